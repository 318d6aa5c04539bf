"""LlguidanceBackend: the GrammarBackend over the llguidance library."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLExecutor, LLMatcher

from pagoda.base.errors import PagodaError
from pagoda.base.sampling_params import OutputRule
from pagoda.engine.grammars.compiling import compile_grammar, library_error
from pagoda.engine.grammars.vocabulary import GrammarVocabulary
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.process.host_threads import host_pool
from pagoda.worker.grammar import GrammarMatcher, MaskWork

_NUM_COMPILERS = 2
_WRONG_TOKEN = "doesn't satisfy the grammar"  # what the library says of a token that its masks forbid


class LlguidanceMatcher:
    """See worker.grammar.GrammarMatcher. The library reports errors by `get_error`, but it may also panic.

    has_ended: an end token was taken; only end tokens may follow it.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int]) -> None:
        self.inner = matcher
        self._eos_ids = frozenset(eos_ids)
        self.has_ended = False
        self.num_free = 0
        self._failure = ""

    @property
    def error(self) -> str:
        return self._failure or self.inner.get_error()

    def fail(self, error: BaseException) -> None:
        """The library raised `error` instead of reporting it. Raises it again if it is not the library's."""
        self._failure = library_error(error)

    @property
    def is_grammars_fault(self) -> bool:
        return not self._failure and _WRONG_TOKEN not in self.inner.get_error()

    def advance(self, token_ids: Sequence[int]) -> None:
        try:
            for token_id in token_ids:
                if self.has_ended or self._failure:
                    return
                # Any end token ends the output; the library knows several, but takes each once.
                self.has_ended = token_id in self._eos_ids
                if not self.inner.consume_token(token_id):
                    return
        except BaseException as error:
            self.fail(error)

    def before_end(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts in front of the first end token; none after the output has ended."""
        if self.has_ended:
            return []
        end = next((i for i, draft in enumerate(drafts) if draft in self._eos_ids), len(drafts))
        return list(drafts[:end])

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        if self.has_ended or self._failure:
            return 0
        try:
            return self.inner.validate_tokens(list(token_ids))
        except BaseException as error:
            self.fail(error)
            return 0

    def forced(self) -> Sequence[int]:
        # The library's masks allow only these where the tokenizer is canonical; otherwise it returns none.
        if self.has_ended or self._failure:
            return ()
        try:
            return self.inner.compute_ff_tokens()
        except BaseException as error:
            self.fail(error)
            return ()

    def copy(self) -> "GrammarMatcher":
        if self._failure:
            return FailedGrammar(self._failure)
        try:
            copied = LlguidanceMatcher(self.inner.deep_copy(), self._eos_ids)
        except BaseException as error:
            return FailedGrammar(library_error(error))
        copied.has_ended = self.has_ended
        return copied


class FailedGrammar:
    """The GrammarMatcher of a grammar that could not be compiled.

    is_grammars_fault: whether the library refused the grammar, rather than failed itself.
    """

    def __init__(self, error: str, is_grammars_fault: bool = False) -> None:
        self.error = error
        self.is_grammars_fault = is_grammars_fault
        self.num_free = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return 0

    def forced(self) -> Sequence[int]:
        return ()

    def copy(self) -> "FailedGrammar":
        return self


_Work = tuple[LlguidanceMatcher, int] | tuple[LlguidanceMatcher, int, list[int]]


class LlguidanceBackend:
    """See worker.grammar.GrammarBackend. The tokenizer is loaded with the first grammar, on its thread.

    load_tokenizer: returns the model's tokenizer.   vocab_size: of the model's logits.
    threads: that fill masks.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, threads: int) -> None:
        self.vocabulary = GrammarVocabulary(load_tokenizer, vocab_size)
        self._threads = threads
        self._compiled: dict[str, GrammarMatcher] = {}
        self._pool = host_pool(_NUM_COMPILERS, "pagoda-grammar")
        self._executor: LLExecutor | None = None

    def prepare(self, grammar: str) -> "Future[None]":
        return self._pool.submit(self._prepare, grammar)

    def _prepare(self, grammar: str) -> None:
        self._compiled[grammar] = self.compile(grammar)

    def drop(self, grammar: str) -> None:
        self._compiled.pop(grammar, None)

    def matcher(self, rule: OutputRule) -> GrammarMatcher:
        compiled = self._compiled.get(rule.grammar)
        if compiled is None:  # only if it was not prepared
            compiled = self._pool.submit(self.compile, rule.grammar).result()
        return compiled.copy()

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> None:
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        masks[:] = -1
        plain: list[_Work] = []
        drafted: list[_Work] = []
        for one in work:
            assert isinstance(one.matcher, LlguidanceMatcher)
            drafts = one.matcher.before_end(one.drafts)
            if drafts:
                drafted.append((one.matcher, one.first, drafts))
            else:
                plain.append((one.matcher, one.first))
            if len(drafts) < len(one.drafts):  # what follows an end token, the library leaves open
                masks[one.first + len(drafts) + 1 : one.first + len(one.drafts) + 1] = self._end_mask(masks.shape[1])
        self._compute(self._executor.unsafe_compute_mask_ptr, plain, masks)
        self._compute(self._executor.unsafe_compute_mask_ptr_with_draft_token, drafted, masks)

    def _compute(self, call: Callable[..., None], work: Sequence[_Work], masks: np.ndarray) -> None:
        """Call the library for all of `work`, or, if that panics, for one after the other."""
        if not work:
            return
        where = (masks.ctypes.data, masks.shape[1] * 4, masks.shape[0])
        try:
            call([(matcher.inner, *rest) for matcher, *rest in work], *where)
            return
        except BaseException as error:
            library_error(error)
        for matcher, *rest in work:
            try:
                call([(matcher.inner, *rest)], *where)
            except BaseException as error:
                matcher.fail(error)

    def _end_mask(self, num_words: int) -> np.ndarray:
        """Return the mask after an end token: only end tokens may follow."""
        mask = np.zeros(num_words, np.uint32)
        for token_id in self.vocabulary.eos_ids:
            mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
        return mask.view(np.int32)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def compile(self, grammar: str) -> GrammarMatcher:
        """Compile a grammar. One that fails is a matcher with an error: its requests must not wait for ever."""
        try:
            tokenizer = self.vocabulary.get()
            inner = compile_grammar(tokenizer, grammar)
            error = inner.get_error()
            return FailedGrammar(error, True) if error else LlguidanceMatcher(inner, self.vocabulary.eos_ids)
        except PagodaError as error:
            return FailedGrammar(str(error))
        except BaseException as error:
            return FailedGrammar(library_error(error))
