"""Vocabulary: what a grammar library must know of a tokenizer, as plain values."""

from dataclasses import dataclass
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.engine.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """tokens: the bytes of each id.   special_ids: tokens that are not text.   eos_ids: tokens that end an output."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> "Vocabulary":
        """vocab_size: of the model's logits. Tokens that the tokenizer lacks have no bytes and are never allowed.

        Raises RequestError for a tokenizer without an end token: a constrained output could not end.
        """
        facts = tokenizer.facts
        eos_ids = tuple(i for i in facts.eos_token_ids if 0 <= i < vocab_size)
        if not eos_ids:
            raise RequestError(
                "structured output needs a tokenizer with an end token (eos_token), which this model's lacks",
                "structured_outputs",
            )
        return cls(
            tokens=tuple(map(tokenizer.token_bytes, range(vocab_size))),
            special_ids=tuple(sorted({*facts.special_token_ids, *eos_ids} & set(range(vocab_size)))),
            eos_ids=eos_ids,
            bos_id=facts.bos_token_id,
        )


class LibraryVocabulary:
    """A Vocabulary in the form that llguidance's TokenizerWrapper reads."""

    def __init__(self, vocabulary: Vocabulary, encode: Any) -> None:
        """encode: text -> token ids, without special tokens."""
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = vocabulary.bos_id
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):  # how TokenizerWrapper finds out what is taken
            raise TypeError("expected a string")
        return self._encode(text)
