"""Logit bias, penalties, allowed and forbidden tokens of a whole batch, applied to its logits in place."""
