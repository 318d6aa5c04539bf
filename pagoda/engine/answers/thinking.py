"""ThinkingBackend: the GrammarBackend that also knows outputs whose reasoning has a budget, with a grammar or none."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pagoda.base.errors import PagodaError
from pagoda.base.param_values import MAX_COUNT
from pagoda.core.grammar import GrammarMatcher, MaskWork
from pagoda.engine.answers.reasoning import REASONING_FORMATS, new_splitter
from pagoda.engine.grammars.llguidance_backend import FailedGrammar, LlguidanceBackend
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_MOST_UNREAD = 256
"""Tokens that are read at once, at most, while a thought goes on: with thousands, other rows would wait."""
_FIRST = '{"budget": '  # no other grammar begins like this


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A bound on the reasoning in an output.

    budget: tokens between the tags that begin and end it.   format: a name in REASONING_FORMATS.
    is_open: the prompt ends inside it.   grammar: the output's own, None for any output.
    """

    budget: int
    format: str
    is_open: bool
    grammar: str | None

    @property
    def text(self) -> str:
        """It as a grammar's text."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "ThinkingBudget | None":
        """Return the budget that is a grammar's text, None if it is another grammar."""
        return cls(**json.loads(text)) if text.startswith(_FIRST) else None


class _Thought:
    """How far an output has thought.   forced: tokens that must follow now, one after the other."""

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer) -> None:
        tags = REASONING_FORMATS[budget.format]
        self._splitter = new_splitter(tags, budget.is_open)
        self._token_bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._closings = [tuple(tokenizer.encode(text, False)) for text in tags.closings]
        self._num_left = budget.budget
        self.forced: tuple[int, ...] = ()
        self._force_closing()

    def _force_closing(self) -> None:
        """Force the closing of a thought that has used up the budget."""
        if self._splitter.is_inside and self._num_left <= 0:
            self.forced = self._closings[0]

    @property
    def num_free(self) -> int:
        """See core.grammar.GrammarMatcher."""
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


class ThinkingMatcher:
    """See core.grammar.GrammarMatcher. Forbids nothing but what would exceed the budget, and what `grammar` forbids.

    Where that forbids a token of the closing, as inside a character, it goes on, and the closing is tried again.
    """

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer, grammar: GrammarMatcher | None) -> None:
        """grammar: the matcher of the budget's grammar."""
        self.grammar = grammar
        self._thought = _Thought(budget, tokenizer)

    @property
    def error(self) -> str:
        return "" if self.grammar is None else self.grammar.error

    @property
    def is_grammars_fault(self) -> bool:
        return self.grammar is not None and self.grammar.is_grammars_fault

    @property
    def num_free(self) -> int:
        return self._thought.num_free if self.grammar is None else 0

    def advance(self, token_ids: Sequence[int]) -> None:
        self._thought.take_all(token_ids)
        if self.grammar is not None:
            self.grammar.advance(token_ids)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        most = len(token_ids) if self.grammar is None else self.grammar.count_allowed(token_ids)
        thought = self._thought.copy()
        for at, token_id in enumerate(token_ids[:most]):
            if thought.forced and thought.forced[0] != token_id:
                return at
            thought.take(token_id)
        return most

    def forced(self) -> Sequence[int]:
        forced = self._thought.forced
        if forced:
            return forced[: self.count_allowed(forced)]
        return () if self.grammar is None else self.grammar.forced()

    def copy(self) -> "ThinkingMatcher":
        copied = copy.copy(self)
        copied._thought = self._thought.copy()
        copied.grammar = None if self.grammar is None else self.grammar.copy()
        return copied

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
    """See core.grammar.GrammarBackend. A grammar's text may be that of a ThinkingBudget."""

    def compile(self, grammar: str) -> GrammarMatcher:
        if (budget := ThinkingBudget.of(grammar)) is None:
            return super().compile(grammar)
        inner = None if budget.grammar is None else super().compile(budget.grammar)
        if isinstance(inner, FailedGrammar):
            return inner
        try:
            return ThinkingMatcher(budget, self.vocabulary.tokenizer, inner)
        except PagodaError as error:
            return FailedGrammar(str(error))

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> None:
        inner: list[MaskWork] = []
        for one in work:
            matcher = one.matcher.grammar if isinstance(one.matcher, ThinkingMatcher) else one.matcher
            if matcher is not None:
                inner.append(MaskWork(matcher, one.first, one.drafts))
        super().fill(inner, masks)
        for one in work:
            if isinstance(one.matcher, ThinkingMatcher):
                one.matcher.narrow(masks[one.first : one.first + len(one.drafts) + 1], one.drafts)
