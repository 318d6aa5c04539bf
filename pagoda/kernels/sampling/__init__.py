"""From logits to one token a row: `reference.py` is the definition, `batched.py` the same over a batch in torch."""
