"""The HTTP server: OpenAI's API over an engine process.

A request passes AccessLog and Gate (middleware.py), and reaches its route. A route reads its body into a typed struct
(body.py; protocol.py, sampling_body.py, pooling_bodies.py), admits it (admission.py), and turns it into prompts and
parameters (chat.py, completions.py, pooling.py; tool_choice.py for the grammar of calls). RequestStarter
(generation.py) tokenises them and starts the requests in the engine; their outputs become the structs of answers.py
(tool_parsers/ finds calls in text), which responses.py sends, whole or as a stream. respond.py is that course for all
generated text. transcription.py (transcription_bodies.py) has forms with
sounds; operations.py has the routes that generate nothing.

state.py builds what all routes share. routing.py declares and describes routes; app.py serves them on uvicorn from the
socket of listening.py until a signal, then drains. Every error becomes OpenAI's format in errors.py.
"""
