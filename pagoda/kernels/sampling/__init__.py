"""From logits to one token per row, by way of bias, penalties, allowed and forbidden tokens.

`reference.py` is the definition, `library.py` the same over a batch in torch; `batch.py`: what a batch is sampled with.
"""
