"""Kernels: the ops of a model, one folder per op, with a slow, obvious reference next to the fast versions."""
