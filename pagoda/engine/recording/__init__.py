"""Recordings: the calls, decisions and results of a scheduler, written down, run again and compared.

format.py        what a line is, and when two decisions are equal
files.py         the files of a recording, of which the oldest are removed
made_up.py       the tokens and names that are written in place of real ones
recorder.py      RecordingScheduler, between EngineCore and its scheduler
preparations.py  when grammars and adapters were ready: noted, and answered again
player.py        make the recorded calls on a scheduler of this version
selection.py     which requests, steps and times are compared
replay.py        play a file, and find where it differs
compare.py       tokens and seconds of steps that a model computes again
"""
