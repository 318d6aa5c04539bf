"""ThinkingBackend: the GrammarBackend that also knows outputs whose reasoning has a budget, with a grammar or none."""

import copy
from collections.abc import Callable, Sequence

import numpy as np

from pagoda.base.errors import PagodaError
from pagoda.base.param_values import MAX_COUNT
from pagoda.base.sampling_params import OutputRule, PromptReasoning
from pagoda.engine.answers.reasoning import REASONING_FORMATS, new_splitter
from pagoda.engine.grammars.llguidance_backend import FailedGrammar, LlguidanceBackend
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.worker.grammar import GrammarMatcher, MaskWork

_MOST_UNREAD = 256
"""Tokens that are read at once, at most, while a thought goes on: with thousands, other rows would wait."""


class _Thought:
    """How far an output has thought.   forced: tokens that must follow now, one after the other."""

    def __init__(self, budget: int, reasoning: PromptReasoning, tokenizer: Tokenizer) -> None:
        tags = REASONING_FORMATS[reasoning.format]
        self._splitter = new_splitter(tags, reasoning.is_open)
        self._token_bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._closings = [tuple(tokenizer.encode(text, False)) for text in tags.closings]
        self._num_left = budget
        self.forced: tuple[int, ...] = ()
        self._force_closing()

    def _force_closing(self) -> None:
        """Force the closing of a thought that has used up the budget."""
        if self._splitter.is_inside and self._num_left <= 0:
            self.forced = self._closings[0]

    @property
    def num_free(self) -> int:
        """See worker.grammar.GrammarMatcher."""
        if self.forced:
            return 0
        if self._splitter.is_over:
            return MAX_COUNT
        num_left = self._num_left if self._splitter.is_inside else max(self._num_left, 0) + 1  # the one that begins it
        return min(num_left, _MOST_UNREAD)

    def take_all(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output: all at once what is within a thought and its budget."""
        # A thought that has ended does not begin again, but for channels.
        begins_inside = self._splitter.is_inside and not self._splitter.tags.has_channels
        if not self.forced and begins_inside and len(token_ids) < self._num_left:
            splitter = copy.copy(self._splitter)
            splitter.feed(b"".join(map(self._token_bytes, token_ids)).decode("latin-1"))
            if splitter.is_inside:
                self._splitter = splitter
                self._num_left -= len(token_ids)
                return
        for token_id in token_ids:
            if self._splitter.is_over and not self.forced:
                return  # nothing is counted any more
            self.take(token_id)

    def take(self, token: int) -> None:
        """Add a token of the output."""
        is_forced, was_inside = token in self.forced[:1], self._splitter.is_inside
        # Tags are ASCII: one letter for each byte finds them, and tokens may end inside a character.
        self._splitter.feed(self._token_bytes(token).decode("latin-1"))
        if is_forced:
            self.forced = self.forced[1:]
            if not self.forced:
                self._closings = self._closings[1:] or self._closings
        else:  # nothing was forced, or a grammar has forbidden it
            self._num_left -= was_inside
            self.forced = ()
        if not self.forced:
            self._force_closing()

    def copy(self) -> "_Thought":
        copied = copy.copy(self)
        copied._splitter = copy.copy(self._splitter)
        return copied


class AnyOutput:
    """The GrammarMatcher of an output that may be any."""

    error, is_grammars_fault, num_free = "", False, MAX_COUNT

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        return ()

    def copy(self) -> "AnyOutput":
        return self


class ThinkingMatcher:
    """See worker.grammar.GrammarMatcher. Forbids nothing but what would exceed the budget, and what `grammar` forbids.

    Where that forbids a token of the closing, as inside a character, it goes on, and the closing is tried again.
    """

    def __init__(self, thought: _Thought, grammar: GrammarMatcher) -> None:
        self.grammar = grammar
        self._thought = thought

    @property
    def error(self) -> str:
        return self.grammar.error

    @property
    def is_grammars_fault(self) -> bool:
        return self.grammar.is_grammars_fault

    @property
    def num_free(self) -> int:
        return min(self._thought.num_free, self.grammar.num_free)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._thought.take_all(token_ids)
        self.grammar.advance(token_ids)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        most = self.grammar.count_allowed(token_ids)
        thought = self._thought.copy()
        for at, token_id in enumerate(token_ids[:most]):
            if thought.forced and thought.forced[0] != token_id:
                return at
            thought.take(token_id)
        return most

    def forced(self) -> Sequence[int]:
        forced = self._thought.forced
        return forced[: self.count_allowed(forced)] if forced else self.grammar.forced()

    def copy(self) -> "ThinkingMatcher":
        return ThinkingMatcher(self._thought.copy(), self.grammar.copy())

    def narrow(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Let the masks that its grammar allows, of the next token and after each draft, allow only what is forced."""
        thought = self._thought.copy()
        for at, mask in enumerate(masks):
            if thought.forced:
                word, bit = divmod(thought.forced[0], 32)
                only = np.int32(np.uint32(1 << bit).view(np.int32))
                if mask[word] & only:
                    mask[:] = 0
                    mask[word] = only
            if at < len(drafts):
                thought.take(drafts[at])


class ThinkingBackend(LlguidanceBackend):
    """See worker.grammar.GrammarBackend. A budget is counted over the matcher of its rule's grammar."""

    def compile(self, grammar: str) -> GrammarMatcher:
        if grammar:
            return super().compile(grammar)
        try:
            _ = self.vocabulary.tokenizer  # loaded on this thread: budgets are counted in steps
        except PagodaError as error:
            return FailedGrammar(str(error))
        return AnyOutput()

    def matcher(self, rule: OutputRule) -> GrammarMatcher:
        matcher = super().matcher(rule)
        if rule.budget is None or rule.reasoning is None or isinstance(matcher, FailedGrammar):
            return matcher
        return ThinkingMatcher(_Thought(rule.budget, rule.reasoning, self.vocabulary.tokenizer), matcher)

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> None:
        inner: list[MaskWork] = []
        for one in work:
            matcher = one.matcher.grammar if isinstance(one.matcher, ThinkingMatcher) else one.matcher
            if not isinstance(matcher, AnyOutput):
                inner.append(MaskWork(matcher, one.first, one.drafts))
        super().fill(inner, masks)
        for one in work:
            if isinstance(one.matcher, ThinkingMatcher):
                one.matcher.narrow(masks[one.first : one.first + len(one.drafts) + 1], one.drafts)
