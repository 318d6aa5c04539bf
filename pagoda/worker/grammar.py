"""The interface of grammars: what a backend offers to the worker that samples."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagoda.base.sampling_params import OutputRule


class GrammarMatcher(Protocol):
    """The state of one sequence in its grammar: which tokens may follow those that it was given.

    Its methods do not raise, whatever the library does: what goes wrong is in `error`.
    """

    @property
    def error(self) -> str:
        """Why it cannot continue, or ""; it does not recover."""
        ...

    @property
    def is_grammars_fault(self) -> bool:
        """Whether the error is the grammar's: it does not compile, or exceeds a limit where the output has led."""
        ...

    @property
    def num_free(self) -> int:
        """So many of the next tokens may be any, whatever those before them are; their masks need not be filled."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens that the sequence has emitted. A token that the grammar forbids sets `error`."""
        ...

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` may follow, one after the other. The state stays."""
        ...

    def forced(self) -> Sequence[int]:
        """Return tokens that must follow one after the other: the only ones that the masks allow. May be empty.

        The state stays. A backend that cannot tell returns none.
        """
        ...

    def copy(self) -> "GrammarMatcher":
        """Return another matcher in the same state."""
        ...


@dataclass(frozen=True, slots=True)
class MaskWork:
    """Masks to fill for one sequence: one for the next token, and one after each of its drafts.

    first: index of its first mask; the others follow.
    """

    matcher: GrammarMatcher
    first: int
    drafts: tuple[int, ...] = ()


class GrammarBackend(Protocol):
    """Compiles grammars and fills masks. Thread-safe."""

    def prepare(self, grammar: str) -> "Future[None]":
        """Compile a grammar (of an OutputRule) on another thread, and keep it. The future has no error, whatever the
        grammar is like."""
        ...

    def drop(self, grammar: str) -> None:
        """Keep a grammar no longer. Ignore one that is not kept."""
        ...

    def matcher(self, rule: OutputRule) -> GrammarMatcher:
        """Return a matcher at the beginning of an output; it has an `error` if the rule's grammar does not compile.

        Called in steps: a grammar that is kept is not compiled again. Does not raise.
        """
        ...

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> None:
        """Fill masks in parallel, without holding the GIL.

        masks: int32 [num_masks, ceil(vocab_size / 32)], one bit per token, lowest first: 1 where it may follow. After
        a draft that may not follow, the later masks of that sequence may be anything. A matcher that fails has an
        `error`, and its masks may be anything; the others' masks are not affected.
        """
        ...

    def shutdown(self) -> None:
        """Drop grammars that wait to be compiled. Idempotent."""
        ...


def num_mask_words(vocab_size: int) -> int:
    """Return the int32 words of one mask."""
    return -(-vocab_size // 32)
