"""LlguidanceBackend: the GrammarBackend over the llguidance library; GrammarVocabulary: a tokenizer in its form."""

import json
import logging
import re
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import llguidance
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from pagoda.base.errors import PagodaError, RequestError
from pagoda.core.grammar import GrammarMatcher, MaskWork
from pagoda.engine.tokenizers.tokenizer import Tokenizer, is_panic
from pagoda.process.host_threads import host_pool

logger = logging.getLogger("pagoda")

_NUM_COMPILERS = 2
_QUIET = 0
_SEVERAL = '{"grammars": ['
_WRONG_TOKEN = "doesn't satisfy the grammar"  # what the library says of a token that its masks forbid
_NUM_TRIALS = 3
_TRIAL_TOKENS = 6
_MAX_MESSAGE_CHARS = 300
_PLACE_IN_TEXT = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_STACK_BYTES = 256 * 2**20  # of address space; memory is used as far as a grammar is deep
_STACK_SIZE_LOCK = threading.Lock()  # the stack size of new threads is a setting of the process
LIMITS = LLParserLimits(initial_lexer_fuel=300_000, max_lexer_states=50_000, verbose_errors=False)
"""Bounds on the work and memory of one grammar. Every process compiles with the same ones."""


def _library_form(text: str) -> str:
    """Return a grammar's text as the library takes it: one grammar, or a list of them that name each other."""
    return text if text.startswith(_SEVERAL) else json.dumps({"grammars": [{"lark_grammar": text}]})


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Return a matcher at the beginning of a grammar; look at its `get_error`. Releases the GIL.

    Compiling recurses as deep as a grammar's rules name each other, thousands of them at most, so it runs on a thread
    with a large stack.
    """
    done: Future[LLMatcher] = Future()

    def compile_it() -> None:
        try:
            done.set_result(LLMatcher(tokenizer, _library_form(text), log_level=_QUIET, limits=LIMITS))
        except BaseException as error:  # the caller's to handle
            done.set_exception(error)

    with _STACK_SIZE_LOCK:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=compile_it, name="pagoda-grammar-compiler", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    return done.result()


def error_of_grammar(tokenizer: LLTokenizer, text: str) -> str:
    """Return why no output can follow a grammar, "" if one can: compile it and try a few short outputs.

    Some grammars compile but allow no first token (`{"$ref": "#"}`, `start: start`). Others exceed a limit of the
    library as soon as an output begins, such as a rule with thousands of alternatives: if no trial gets through, no
    output of the model would.
    """
    try:
        matcher = compile_grammar(tokenizer, text)
        error = matcher.get_error()
        for trial in range(0 if error else _NUM_TRIALS):
            found = _error_of_output(matcher.deep_copy(), trial)
            if not found:
                return ""
            error = error or found
    except BaseException as raised:
        error = _library_error(raised)
    return _shorten(error)


def _error_of_output(matcher: LLMatcher, trial: int) -> str:
    """Return the error of an output, chosen by the number of its trial among those that the grammar allows, or ""."""
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_stopped():  # by an end token
            break
        try:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        except ValueError as error:
            return str(error)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not len(allowed):
            break
        if not matcher.consume_token(int(allowed[trial * (len(allowed) - 1) // (_NUM_TRIALS - 1)])):
            break
    return matcher.get_error()


def _shorten(message: str) -> str:
    """Return the first line of the library's message; the grammar's own text follows it, then, for a regex, why."""
    line, *more = _PLACE_IN_TEXT.sub("", message.strip()).split("\n")
    line += next((one.removeprefix("error:") for one in more if one.startswith("error:")), "")
    if line == "NoExtensionBias":  # what the library says of a grammar without a first token
        return "no text satisfies it"
    if line.startswith("panic: "):  # it has 65,000 symbols at most
        return "it is too large for the grammar library"
    if line.startswith("oneOf constraints"):
        return "the alternatives of a oneOf may overlap; tell them apart by a required constant, or use anyOf"
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 3] + "..."


class LlguidanceMatcher:
    """See core.grammar.GrammarMatcher. The library reports errors by `get_error`, but it may also panic.

    has_ended: an end token was taken; only end tokens may follow it.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int]) -> None:
        self.inner = matcher
        self._eos_ids = frozenset(eos_ids)
        self.has_ended = False
        self._failure = ""

    @property
    def error(self) -> str:
        return self._failure or self.inner.get_error()

    def fail(self, error: BaseException) -> None:
        """The library raised `error` instead of reporting it. Raises it again if it is not the library's."""
        self._failure = _library_error(error)

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
            return FailedGrammar(_library_error(error))
        copied.has_ended = self.has_ended
        return copied


class FailedGrammar:
    """The GrammarMatcher of a grammar that could not be compiled.

    is_grammars_fault: whether the library refused the grammar, rather than failed itself.
    """

    def __init__(self, error: str, is_grammars_fault: bool = False) -> None:
        self.error = error
        self.is_grammars_fault = is_grammars_fault

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return 0

    def forced(self) -> Sequence[int]:
        return ()

    def copy(self) -> "FailedGrammar":
        return self


_Work = tuple[LlguidanceMatcher, int] | tuple[LlguidanceMatcher, int, list[int]]


def _library_error(error: BaseException) -> str:
    """Return the message of what the library raised. Raises it again if it is not the library's, as Ctrl-C is not."""
    if not (isinstance(error, Exception) or is_panic(error)):
        raise error
    logger.error("the grammar library failed: %s", error, exc_info=error)
    return str(error) or type(error).__name__


class LlguidanceBackend:
    """See core.grammar.GrammarBackend. The tokenizer is loaded with the first grammar, on the thread that compiles it.

    load_tokenizer: returns the model's tokenizer.   vocab_size: of the model's logits.
    threads: that fill masks.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, threads: int) -> None:
        self._vocabulary = GrammarVocabulary(load_tokenizer, vocab_size)
        self._threads = threads
        self._compiled: dict[str, GrammarMatcher] = {}
        self._pool = host_pool(_NUM_COMPILERS, "pagoda-grammar")
        self._executor: LLExecutor | None = None

    def prepare(self, grammar: str) -> "Future[None]":
        return self._pool.submit(self._prepare, grammar)

    def _prepare(self, grammar: str) -> None:
        self._compiled[grammar] = self._compile(grammar)

    def drop(self, grammar: str) -> None:
        self._compiled.pop(grammar, None)

    def matcher(self, grammar: str) -> GrammarMatcher:
        compiled = self._compiled.get(grammar)
        if compiled is None:  # only if it was not prepared
            compiled = self._pool.submit(self._compile, grammar).result()
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
            _library_error(error)
        for matcher, *rest in work:
            try:
                call([(matcher.inner, *rest)], *where)
            except BaseException as error:
                matcher.fail(error)

    def _end_mask(self, num_words: int) -> np.ndarray:
        """Return the mask after an end token: only end tokens may follow."""
        mask = np.zeros(num_words, np.uint32)
        for token_id in self._vocabulary.eos_ids:
            mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
        return mask.view(np.int32)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> GrammarMatcher:
        """Compile a grammar. One that fails is a matcher with an error: its requests must not wait for ever."""
        try:
            tokenizer = self._vocabulary.get()
            inner = compile_grammar(tokenizer, grammar)
            error = inner.get_error()
            return FailedGrammar(error, True) if error else LlguidanceMatcher(inner, self._vocabulary.eos_ids)
        except PagodaError as error:
            return FailedGrammar(str(error))
        except BaseException as error:
            return FailedGrammar(_library_error(error))


# ---- a model's tokenizer in the form of the library


class GrammarVocabulary:
    """Built when it is first asked for, which holds the GIL: for a tenth of a second with 50,000 tokens. Thread-safe.

    load: returns the tokenizer.   vocab_size: of the model's logits.   eos_ids: tokens that end an output, once built.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self.eos_ids: tuple[int, ...] = ()
        self._built: LLTokenizer | None = None
        self._lock = threading.Lock()

    def get(self) -> LLTokenizer:
        """Return the library's tokenizer. Raises the errors of `load`.

        Raises RequestError for a tokenizer without an end token: a constrained output could not end.
        """
        with self._lock:
            if self._built is None:
                tokenizer, size = self._load(), self._vocab_size
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
