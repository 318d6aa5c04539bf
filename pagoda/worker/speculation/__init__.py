"""Speculative decoding: drafts for the next step, and how many of them. A wrong draft costs time, and changes no token.

setup.py         DraftSetup: what is decided before anything is loaded
speculator.py    Speculator: what an executor asks in each step; an error turns it off
controller.py    DraftController: one measured rule for the lengths of drafts, which never lose time
drafter.py       Drafter, the protocol, and Draft, what it gives
lookup.py        drafts that are looked up: in the row's own text (ngram), and in earlier outputs (suffix)
models.py        drafts that a model draws: a smaller one with a KV cache of its own, or the model's own first layers
registry.py      make_drafter: which there are; what a grammar forces is drafted first with any of them
loaded_draft.py  a draft model in memory, and a worker's speculator
"""
