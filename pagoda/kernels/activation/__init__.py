"""Activations, gated and plain, and the logit soft cap."""
