"""Ways to propose the next tokens of rows. A wrong proposal costs time; it never changes a token.

drafter.py   Drafter, the protocol, and Draft, what it gives
lookup.py    drafts that are looked up: in the row's own text (ngram), and in earlier outputs (suffix)
models.py    drafts that a model draws: a smaller one with a KV cache of its own, or the model's own first layers
registry.py  make_drafter: which there are; what a grammar forces is drafted first with any of them
"""
