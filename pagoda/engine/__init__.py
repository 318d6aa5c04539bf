"""The engine: prompts in, texts out. It never imports torch.

text in      templates/, tokenizers/, images/, inputs/, grammars/: a conversation or text becomes a Request, or is
             refused
sounds       transcription/: a sound file becomes such requests, and their tokens become text with times
core         engine_core.py: schedule, execute, update: one step; the only place where time passes
text out     outputs/: columns of token ids become RequestOutputs, cut at stop strings; answers/: the reasoning and the
             calls in them
one thread   llm_engine.py has all three, stepped by its caller; engine_thread.py steps it on a thread, for LLM
             (offline.py, offline_transcription.py) and AsyncLLM
event loops  async_engine.py has text in and out on the event loop (async_text.py), and reaches a core through clients/:
             ThreadClient on a thread, for AsyncLLM; for the server ProcessClient in another process: Journal keeps
             what a replay needs, Supervisor starts the next process after a death, Suspects finds the request at fault
between them wire.py: the messages; flight_recorder.py: which requests are in the steps that a dead process ran
"""
