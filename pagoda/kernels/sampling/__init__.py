"""From logits to one token per row: `reference.py` is the definition, `library.py` the same over a batch in torch."""
