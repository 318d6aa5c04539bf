"""GrammarVocabulary: a model's tokenizer in the form of the grammar library."""

import threading
from collections.abc import Callable

import llguidance
from llguidance import LLTokenizer

from pagoda.base.errors import RequestError
from pagoda.engine.tokenizers.tokenizer import Tokenizer


class GrammarVocabulary:
    """Built when it is first asked for, which holds the GIL: for a tenth of a second with 50,000 tokens. Thread-safe.

    load: returns the tokenizer.   vocab_size: of the model's logits.   eos_ids: tokens that end an output, once built.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self.eos_ids: tuple[int, ...] = ()
        self._loaded: Tokenizer | None = None
        self._built: LLTokenizer | None = None
        self._lock = threading.RLock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises the errors of `load`."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def get(self) -> LLTokenizer:
        """Return the library's tokenizer. Raises the errors of `load`.

        Raises RequestError for a tokenizer without an end token: a constrained output could not end.
        """
        with self._lock:
            if self._built is None:
                tokenizer, size = self.tokenizer, self._vocab_size
                self.eos_ids = tuple(i for i in tokenizer.facts.eos_token_ids if 0 <= i < size)
                if not self.eos_ids:
                    raise RequestError(
                        "structured output needs a tokenizer with an end token (eos_token), which this model's lacks",
                        "structured_outputs",
                    )
                wrapper = llguidance.TokenizerWrapper(_Wrapped(tokenizer, size, self.eos_ids))
                self._built = LLTokenizer(wrapper, n_vocab=size, eos_token=list(self.eos_ids))
            return self._built


class _Wrapped:
    """What TokenizerWrapper reads. Tokens that the tokenizer lacks have no bytes and are never allowed."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: tuple[int, ...]) -> None:
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.facts.bos_token_id
        self.tokens = list(map(tokenizer.token_bytes, range(size)))
        self.special_token_ids = sorted({*tokenizer.facts.special_token_ids, *eos_ids} & set(range(size)))
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):  # how TokenizerWrapper finds out what is taken
            raise TypeError("expected a string")
        return self._tokenizer.encode(text, False)
