"""Transcription: from a sound file to what a speech model reads, and from its tokens to text with times.

sound.py     decode a file from memory, within bounds; the spectrogram of a sound
transcriber.py  a sound and a caller's options: pieces of it, each of which is transcribed window by window in piece.py,
                with the prompts and rules of whisper_tokens.py; it asks, and what runs the engine answers:
                async_text.py in an event loop, offline_transcription.py for LLM
words.py     when each word is said
formats.py   a transcription as text, subtitles or JSON
"""
