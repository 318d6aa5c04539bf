"""Ways to propose the next tokens of rows. A wrong proposal costs time; it never changes a token.

drafter.py       Drafter, the protocol, and Draft, what it gives
lookup.py        drafts that are looked up: in the row's own text (ngram), and in earlier outputs (suffix)
rollout.py       tokens drawn one after the other from a model, for several rows at once
draft_model.py   of a smaller model with a KV cache of its own
layer_skip.py    of the model's own first layers
registry.py      make_drafter: which there are; what a grammar forces is drafted first with any of them
"""
