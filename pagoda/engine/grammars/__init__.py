"""Structured output: from what a request asks for to a grammar, and from a grammar to masks over the vocabulary.

1. `grammar_text.py` turns StructuredOutputsParams into a grammar, in the variant of Lark that llguidance reads; GBNF
   (`gbnf.py`; `gbnf_lexing.py` finds what must be read character by character) and structural tags
   (`structural_tags.py`) too.
2. `json_schema.py` prepares the schemas in it: refuses what the library would ignore, rewrites references and older
   forms, and refuses what would take long to compile (`schema_size.py`) or what no text could complete
   (`dead_ends.py`).
3. `tool_grammar.py` writes the grammar of tool calls in a model's format. `lark_json.py` turns a caller's grammar into
   one for strings in JSON.
4. `preparer.py` compiles a grammar (`compiling.py`) before its request is accepted: a refusal is a RequestError.
5. `llguidance_backend.py` compiles it for the engine, on threads, and fills masks (the interface: `worker/grammar.py`);
   `vocabulary.py` has a tokenizer in the form of the library.
A caller's schema or grammar is bounded by size before any work on it, and compiled without the GIL.
"""
