"""Rows of the embedding table by token id."""
