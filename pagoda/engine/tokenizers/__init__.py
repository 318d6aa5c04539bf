"""Tokenizers: text to token ids, and each token id to its bytes.

interface   tokenizer.py: the protocol Tokenizer, TokenizerFacts, and LibraryTokenizer, over the `tokenizers` library
loading     load_tokenizer.py finds the files, and reads a tokenizer.json; gguf_tokenizer.py rebuilds a
            tokenizer from the arrays of a GGUF file, and finds the merges where it has none; byte_tokenizer.py has one
            token per byte, for no model
marks       marked_encoder.py: of a rendered template's text, only its marks become special tokens
bounds      token_length.py: how much text a token can cover, to refuse what cannot fit before it is tokenised; and the
            alphabet in which byte-level vocabularies are written

A tokenizer is trusted like the model's weights. Texts of 1,024 characters or more are encoded without the GIL.
"""
