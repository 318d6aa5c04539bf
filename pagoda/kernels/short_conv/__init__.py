"""Causal depthwise convolutions over a few tokens, with their state in the cache."""
