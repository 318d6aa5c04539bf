"""The HTTP server: OpenAI's API over an engine process.

A request passes AccessLog and Gate (middleware.py), and reaches its route. A route reads its body into a typed struct
(body.py; protocol.py, sampling_body.py, pooling_bodies.py) and admits it (admission.py). For generated text, respond.py
is the course: a dialect (dialects/) makes a TurnRequest (turn.py) of the body, render.py makes prompts of that
(tool_choice.py: the grammar of calls), RequestStarter (generation.py) tokenises them and starts the requests in the
engine, reader.py turns outputs into events (pagoda.engine.answers), and the dialect makes the structs of
answers.py of those, which sending.py sends, whole or as a stream. pooling.py has embeddings and scores;
transcription.py (transcription_bodies.py) forms with sounds; operations.py the routes that generate nothing.

state.py builds what all routes share. routing.py declares and describes routes; app.py serves them on uvicorn from the
socket of listening.py until a signal, then drains. With several processes, api_group.py starts them (api_process.py)
and has what they share (shared.py, remote_admission.py); peers.py is their way to each other.
Every error becomes OpenAI's format in errors.py.
"""
