"""Ollama's API. Begin with dialect.py: the routes that generate, from a body to a turn, and from a turn to an answer.

bodies.py: the requests; models.py: the lists of models; names.py: pull, copy and delete.
"""
