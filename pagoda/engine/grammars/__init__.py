"""Structured output: from what a request asks for to a grammar, and from a grammar to masks over the vocabulary.

`grammar_text.py` turns StructuredOutputsParams into llguidance's text (`json_schema.py` rewrites schemas for it),
`checker.py` compiles a text in a process that may be killed, `llguidance_backend.py` compiles it for the engine and
matches tokens (`core/grammar.py` is the interface).
"""
