"""Gated activations and the logit soft cap."""
