"""LlguidanceBackend: the GrammarBackend over the llguidance library."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import llguidance
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from pagoda.base.errors import PagodaError
from pagoda.core.grammar import GrammarMatcher, MaskWork
from pagoda.engine.grammars.grammar_text import library_form
from pagoda.engine.grammars.vocabulary import LibraryVocabulary, Vocabulary
from pagoda.engine.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("pagoda")

MAX_GRAMMARS = 256
_NUM_COMPILERS = 2
_QUIET = 0
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Bounds on the work and memory of one grammar. Every process compiles with the same ones."""


def library_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> LLTokenizer:
    """Build the library's form of a tokenizer; takes a tenth of a second for 50,000 tokens."""
    wrapper = llguidance.TokenizerWrapper(LibraryVocabulary(vocabulary, encode))
    return LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos_ids))


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Return a matcher at the beginning of a grammar; look at its `get_error`. Releases the GIL."""
    return LLMatcher(tokenizer, library_form(text), log_level=_QUIET, limits=LIMITS)


class LlguidanceMatcher:
    """See core.grammar.GrammarMatcher."""

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int]) -> None:
        self.inner = matcher
        self._eos_ids = frozenset(eos_ids)
        self._has_ended = False

    @property
    def error(self) -> str:
        return self.inner.get_error()

    @property
    def has_ended(self) -> bool:
        """Whether an end token was taken; only end tokens may follow it."""
        return self._has_ended

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._has_ended:
                return
            # Any end token ends the output; the library knows several, but takes each once.
            self._has_ended = token_id in self._eos_ids
            if not self.inner.consume_token(token_id):
                return

    def before_end(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts in front of the first end token; none after the output has ended."""
        if self._has_ended:
            return []
        end = next((i for i, draft in enumerate(drafts) if draft in self._eos_ids), len(drafts))
        return list(drafts[:end])

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        if self._has_ended:
            return 0
        return self.inner.validate_tokens(list(token_ids))

    def copy(self) -> "LlguidanceMatcher":
        copied = LlguidanceMatcher(self.inner.deep_copy(), ())
        copied._eos_ids, copied._has_ended = self._eos_ids, self._has_ended
        return copied


class FailedGrammar:
    """The GrammarMatcher of a grammar that does not compile."""

    def __init__(self, error: str) -> None:
        self.error = error

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return 0

    def copy(self) -> "FailedGrammar":
        return self


class LlguidanceBackend:
    """See core.grammar.GrammarBackend. The tokenizer is loaded with the first grammar, on the thread that compiles it.

    load_tokenizer: returns the model's tokenizer.   vocab_size: of the model's logits.
    threads: that fill masks.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, threads: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._threads = threads
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._compiled: OrderedDict[str, GrammarMatcher] = OrderedDict()
        self._compiling: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._eos_ids: tuple[int, ...] = ()
        self._executor: LLExecutor | None = None

    def is_ready(self, grammar: str) -> bool:
        with self._lock:
            if grammar in self._compiled:
                return True
            if grammar not in self._compiling:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_NUM_COMPILERS, "pagoda-grammar")
                self._pool.submit(self._compile, grammar)  # waits for the lock
                self._compiling.add(grammar)
            return False

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            if self._compiling:
                self._changed.wait(timeout_s)

    def matcher(self, grammar: str) -> GrammarMatcher:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:  # it was pushed out of the cache while its request waited
            compiled = self._compile(grammar)
        return compiled.copy()

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> None:
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        masks[:] = -1
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for one in work:
            assert isinstance(one.matcher, LlguidanceMatcher)
            drafts = one.matcher.before_end(one.drafts)
            if drafts:
                drafted.append((one.matcher.inner, one.first, drafts))
            else:
                plain.append((one.matcher.inner, one.first))
            if len(drafts) < len(one.drafts):  # what follows an end token, the library leaves open
                masks[one.first + len(drafts) + 1 : one.first + len(one.drafts) + 1] = self._end_mask(masks.shape[1])
        address, mask_bytes, count = masks.ctypes.data, masks.shape[1] * 4, masks.shape[0]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, mask_bytes, count)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, mask_bytes, count)

    def _end_mask(self, num_words: int) -> np.ndarray:
        """Return the mask after an end token: only end tokens may follow."""
        mask = np.zeros(num_words, np.uint32)
        for token_id in self._eos_ids:
            mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
        return mask.view(np.int32)

    def shutdown(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> GrammarMatcher:
        """Compile and keep a grammar. One that fails is kept too: its requests must not wait for ever."""
        compiled: GrammarMatcher
        try:
            tokenizer = self._library_tokenizer()
            compiled = LlguidanceMatcher(compile_grammar(tokenizer, grammar), self._eos_ids)
        except Exception as error:
            if not isinstance(error, PagodaError):
                logger.exception("a grammar could not be compiled")
            compiled = FailedGrammar(str(error) or type(error).__name__)
        with self._changed:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
            self._compiling.discard(grammar)
            self._changed.notify_all()
        return compiled

    def _library_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                tokenizer = self._load_tokenizer()
                vocabulary = Vocabulary.of(tokenizer, self._vocab_size)
                self._eos_ids = vocabulary.eos_ids
                self._tokenizer = library_tokenizer(vocabulary, lambda text: tokenizer.encode(text, False))
            return self._tokenizer
