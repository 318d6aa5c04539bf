"""GrammarRows: the grammar of each row that has one, and the masks of a step, filled while its forward runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from pagoda.base.abbreviate import shorten
from pagoda.base.sampling_params import OutputRule
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.process.host_threads import host_pool
from pagoda.worker.grammar import GrammarBackend, GrammarMatcher, MaskWork, num_mask_words
from pagoda.worker.table_mirror import TableMirror


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """Masks of a step.

    draws: int64 [m], indices of the draws that have one.   bits: int32 [m, ceil(vocab / 32)], 1 where allowed.
    failed: row -> why its grammar cannot continue.   refused: those rows among them whose grammar is at fault.
    """

    draws: np.ndarray
    bits: np.ndarray
    failed: dict[int, str] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _RowGrammar:
    """num_taken: output tokens that the matcher was given.   num_free: how many after them may be any."""

    rule: OutputRule
    matcher: GrammarMatcher
    num_taken: int = 0
    num_free: int = 0


class GrammarRows:
    """Follows each row's output in its grammar.

    A matcher reads the table's tokens when a mask is needed, so it stays correct after preemptions, restarts, forks and
    rejected drafts: masks depend only on the grammar and the row's output. So do failures: a matcher that meets a limit
    of the library, perhaps because of what earlier drafts made it explore, is replaced by a new one, and the row fails
    only if that one fails too, without drafts.

    backend: has the compiled grammars.   thread: fills masks, a new one by default; shut down with this.
    """

    def __init__(self, backend: GrammarBackend, vocab_size: int, thread: ThreadPoolExecutor | None = None) -> None:
        self.backend = backend
        self._num_words = num_mask_words(vocab_size)
        self._rows: dict[int, _RowGrammar] = {}
        self._thread = thread or host_pool(1, "pagoda-masks")
        self._filling: Future[GrammarMasks] | None = None

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's events, in SchedulerOutput's order."""
        if self._filling is not None:  # the last step's forward failed before its masks were used
            wait([self._filling])
        if self._rows:
            for row in output.released.tolist():
                self._rows.pop(row, None)
        for init in output.admitted:
            self._rows.pop(init.row, None)
            rule = init.sampling.rule if init.sampling is not None else None
            if rule is not None:
                self._rows[init.row] = _RowGrammar(rule, self.backend.matcher(rule))
        for source, row in (*output.beams.copies, *((fork.src, fork.dst) for fork in output.forks)):
            self._rows.pop(row, None)
            known = self._rows.get(source)
            if known is not None:
                self._rows[row] = _RowGrammar(known.rule, known.matcher.copy(), known.num_taken, known.num_free)

    def begin(self, table: TableMirror, rows: np.ndarray, positions: np.ndarray) -> "Future[GrammarMasks] | None":
        """Begin to fill the masks of a step's draws on another thread; None if no draw needs one.

        rows, positions: as Sampler.draw takes them. The table must not change before the result is there.
        """
        masked = self.masked(table, rows, positions)
        if not masked:
            self._filling = None  # `apply` has waited for it; its masks take memory
            return None
        self._filling = self._thread.submit(self._fill, table, rows, positions, masked)
        return self._filling

    def masked(self, table: TableMirror, rows: np.ndarray, positions: np.ndarray) -> set[int]:
        """Return the rows whose grammars must read their output before one of these draws, to mask it."""
        if not self._rows:
            return set()
        mine = np.isin(rows, list(self._rows))
        rows, positions = rows[mine], positions[mine]
        draws = zip(rows.tolist(), (positions - table.num_prompt[rows]).tolist(), strict=True)
        return {row for row, num_output in draws if not self._is_free(row, num_output)}

    def _is_free(self, row: int, num_output: int) -> bool:
        """Return whether the token after `num_output` tokens of output may be any, whatever these are."""
        grammar = self._rows[row]
        return grammar.num_taken <= num_output < grammar.num_taken + grammar.num_free

    def _are_free(self, table: TableMirror, row: int, count: int) -> bool:
        """Return whether the next `count` tokens may be any."""
        num_output = int(table.num_tokens[row] - table.num_prompt[row])
        return self._is_free(row, num_output) and self._is_free(row, num_output + count - 1)

    def allowed_drafts(self, table: TableMirror, drafts: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Return drafts of the next step (int32 [k], by row) as far as their rows' grammars allow them."""
        if not any(row in self._rows for row in drafts):
            return drafts
        kept: dict[int, np.ndarray] = {}
        for row, tokens in drafts.items():
            count = len(tokens)
            if row in self._rows and not self._are_free(table, row, count):
                matcher = self._caught_up(table, row, int(table.num_tokens[row]))
                count = matcher.count_allowed(tokens.tolist())
                if matcher.error:
                    count = 0
                    self._restart(row)
            if count:
                kept[row] = tokens[:count]
        return kept

    @property
    def any(self) -> bool:
        """Whether any row has a grammar."""
        return bool(self._rows)

    def forced(self, table: TableMirror, row: int) -> Sequence[int]:
        """Return the tokens that the row's grammar forces next; none if it has no grammar."""
        if row not in self._rows:
            return ()
        matcher = self._caught_up(table, row, int(table.num_tokens[row]))
        tokens = matcher.forced()
        if matcher.error:
            self._restart(row)
            return ()
        return tokens

    def _caught_up(self, table: TableMirror, row: int, position: int) -> GrammarMatcher:
        """Return the row's matcher after it was given the output up to `position`."""
        grammar, prompt = self._rows[row], int(table.num_prompt[row])
        if position - prompt < grammar.num_taken:  # tokens were taken back
            self._restart(row)
        grammar.matcher.advance(table.token_ids[row, prompt + grammar.num_taken : position].tolist())
        grammar.num_taken, grammar.num_free = position - prompt, grammar.matcher.num_free
        return grammar.matcher

    def _restart(self, row: int) -> None:
        """Give the row a new matcher, which has taken nothing."""
        grammar = self._rows[row]
        grammar.matcher, grammar.num_taken, grammar.num_free = self.backend.matcher(grammar.rule), 0, 0

    def shutdown(self) -> None:
        """Forget all rows and end the threads. Idempotent."""
        self._rows.clear()
        self.backend.shutdown()
        self._thread.shutdown()

    def _fill(self, table: TableMirror, rows: np.ndarray, positions: np.ndarray, masked: set[int]) -> GrammarMasks:
        draws = np.isin(rows, list(masked)).nonzero()[0]
        bits = np.full((len(draws), self._num_words), -1, np.int32)
        work: list[MaskWork] = []
        firsts = [i for i, draw in enumerate(draws) if i == 0 or rows[draw] != rows[draws[i - 1]]]
        for first, end in zip(firsts, [*firsts[1:], len(draws)], strict=True):
            row, position = int(rows[draws[first]]), int(positions[draws[first]])
            drafts = table.token_ids[row, position : position + end - first - 1].tolist()
            work.append(MaskWork(self._caught_up(table, row, position), first, tuple(drafts)))
        self.backend.fill([one for one in work if not one.matcher.error], bits)
        failed: dict[int, str] = {}
        refused: set[int] = set()
        for one in work:
            if one.matcher.error:
                row, position = int(rows[draws[one.first]]), int(positions[draws[one.first]])
                masks = bits[one.first : one.first + 1 + len(one.drafts)]
                matcher = self._fill_afresh(table, row, position, masks)
                if matcher.error:
                    failed[row] = _explain(self._rows[row], matcher)
                    if matcher.is_grammars_fault:
                        refused.add(row)
        return GrammarMasks(draws, bits, failed, frozenset(refused))

    def _fill_afresh(self, table: TableMirror, row: int, position: int, masks: np.ndarray) -> GrammarMatcher:
        """Fill the masks of a row whose matcher has failed, by a new matcher. Return it; it may have failed, too.

        The row's drafts are rejected: after them, nothing is allowed.
        """
        self._restart(row)
        matcher = self._caught_up(table, row, position)
        if not matcher.error:
            masks[1:] = 0
            self.backend.fill([MaskWork(matcher, 0)], masks[:1])
        return matcher


def _explain(grammar: _RowGrammar, matcher: GrammarMatcher) -> str:
    """Return the error message of a row whose grammar cannot continue."""
    said = matcher.error.strip().split("\n", 1)[0]
    if not matcher.is_grammars_fault:
        return f"the output left its grammar: {said}"
    where = f"after {grammar.num_taken} tokens of output"
    return f"the grammar cannot be followed {where}: {said}; it begins {shorten(grammar.rule.grammar)!r}"
