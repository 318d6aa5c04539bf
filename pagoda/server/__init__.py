"""The HTTP server: several APIs over an engine process.

A request passes AccessLog and Gate (middleware.py), and reaches its route, which reads its body into a typed struct
(body.py, body_reader.py, conversation.py). For generated text, respond.py is the course: a dialect (dialects/), which
has the structs of its API, makes a TurnRequest (turn.py) of the body, RequestStarter (request_starter.py) admits it
(admission.py), render.py makes prompts of it (tool_choice.py: the grammar of calls), which RequestStarter tokenises and
starts in the engine as a Generation (generation.py), reader.py turns outputs into events (pagoda.engine.answers), and
the dialect makes its structs of those, which sending.py sends, whole or as a stream. embeddings.py and scores.py have
what is pooled (pooling.py); transcription.py forms with sounds; tokens.py tokens; operations.py the routes that
generate nothing.

state.py builds what all routes share. routing.py declares and describes routes; app.py serves them on uvicorn from the
socket of listening.py until a signal, then drains. With several processes, api_group.py starts them (api_process.py)
and has what they share (shared.py, owned.py, remote_admission.py); peers.py is their way to each other.
Every error gets the format of its API in errors.py.
"""
