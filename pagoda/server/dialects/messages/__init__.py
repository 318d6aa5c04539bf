"""Anthropic's messages. Begin with dialect.py: its routes, from a body to a turn, and from a turn to an answer.

bodies.py: what is asked, and the conversation that it is; cache_diagnosis.py: why the prefix cache had no more of it.
"""
