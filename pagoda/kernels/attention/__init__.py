"""Causal attention over the paged KV cache."""
