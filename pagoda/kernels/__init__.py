"""Kernels: the ops a model is made of, one folder an op, the slow obvious reference beside the fast versions."""
