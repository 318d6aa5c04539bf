"""Speculative decoding: drafts for the next step, and how many of them.

setup.py         DraftSetup: what is decided before anything is loaded
speculator.py    Speculator: what an executor asks in each step; an error turns it off
controller.py    DraftController: one measured rule for the lengths of drafts, which never lose time
loaded_draft.py  a draft model in memory, and a worker's speculator
"""
