"""Attention: causal over the paged KV cache, and bidirectional within the batch."""
