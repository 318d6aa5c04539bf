"""Transcription: from a sound file to what a speech model reads, and from its tokens to text with times.

sound.py     decode a file from memory, within bounds
log_mel.py   the spectrogram of a sound
"""
