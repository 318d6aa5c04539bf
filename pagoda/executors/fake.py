"""FakeExecutor: an executor that computes tokens without a model or torch.

For tests, and for measuring the layers above an executor.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from pagoda.base.errors import WorkerDied
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.worker.calls import Capacity, StepProfile, StepSize
from pagoda.worker.grammar import GrammarBackend
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.speculation.speculator import Speculator
from pagoda.worker.table_mirror import TableMirror

_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def fake_token(token_ids: np.ndarray, seed: int, vocab_size: int) -> int:
    """Return the token after `token_ids` (int [n]) in a row with this seed, a function of these only."""
    return int(_tokens(_digest(token_ids), np.array([seed & (2**64 - 1)], np.uint64), vocab_size)[0])


def _digest(token_ids: np.ndarray) -> np.ndarray:
    """Return a polynomial hash, uint64 [1]: a lost or swapped token changes it."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(token_ids), _BASE, np.uint64))
        return np.array([(powers[::-1] * (token_ids.astype(np.uint64) + np.uint64(1))).sum()], np.uint64)


def _extend(digests: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the digests of the sequences extended by one token each."""
    with np.errstate(over="ignore"):
        return (digests + tokens.astype(np.uint64) + np.uint64(1)) * _BASE


def _tokens(digests: np.ndarray, seeds: np.ndarray, vocab_size: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        mixed = (digests ^ (seeds * _BASE)) * _MIX
        mixed = (mixed ^ (mixed >> np.uint64(31))) * _BASE
    return ((mixed >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int32)


FAKE_EMBEDDING_SIZE = 8


class FakeExecutor:
    """Returns tokens that depend only on the row's tokens, seed and adapter, not on the batch or schedule.

    `fake_token` is the token of a row without an adapter; the digest of an adapter changes the seed.

    It keeps a TableMirror, like a worker. Does not support logprobs. A pooled prompt gets a random vector.
    step_s: duration of a step, which sleeps.   speculator: proposes drafts after each step.
    grammars: a token that a grammar forbids is replaced by one that it allows.
    """

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        block_size: int = 16,
        num_groups: int = 1,
        vocab_size: int = 32000,
        step_s: float = 0.0,
        speculator: Speculator | None = None,
        grammars: GrammarBackend | None = None,
    ) -> None:
        self._table = TableMirror(max_rows, max_len, block_size, num_groups)
        self._digests = np.zeros(max_rows, np.uint64)  # of the known tokens of each row
        self._adapter_seeds = np.zeros(max_rows, np.uint64)
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._speculator = speculator
        self._grammars = GrammarRows(grammars, vocab_size) if grammars is not None else None
        self._alive = False
        self.num_steps = 0

    def start(self, sizes: Sequence[StepSize] = ()) -> Sequence[Capacity]:
        """There are no weights and no pools: nothing limits them."""
        return ()

    def set_pools(self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0) -> None:
        self._alive = True

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        future: Future[ModelRunnerOutput] = Future()
        if not self._alive:
            future.set_exception(WorkerDied("the executor is not running"))
            return future
        try:
            future.set_result(self._run(output))
        except Exception as error:  # passed to the caller, as by a real executor
            future.set_exception(error)
        return future

    def call(self, name: str, *args: object) -> "Future[Any]":
        """Prepare and drop grammars. Adapters' weights are not read, and steps are not profiled."""
        future: Future[Any] = Future()
        if self._alive and name == "prepare_grammar" and self._grammars is not None:
            return self._grammars.backend.prepare(str(args[0]))
        if self._alive:
            if name == "drop_grammar" and self._grammars is not None:
                self._grammars.backend.drop(str(args[0]))
            future.set_result(StepProfile(0, {}, {}, 0, 0.0) if name == "profile" else None)
        else:
            future.set_exception(WorkerDied("the executor is not running"))
        return future

    def shutdown(self) -> None:
        self._alive = False
        if self._grammars is not None:
            self._grammars.shutdown()

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        speculator = self._speculator
        if speculator is None:
            return self._with_pooled(self._compute(output), output)
        speculator.begin_step()
        speculator.apply(output, self._table)
        result = self._with_pooled(self._compute(output), output)
        if output.is_empty:
            return result
        drafts = speculator.finish_step(output, self._table, result.num_sampled, {})
        return replace(result, drafts=drafts, no_drafts_until=speculator.no_drafts_until)

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        table = self._table
        if self._grammars is not None:
            self._grammars.apply(output)
        table.apply(output)
        self.num_steps += 1
        for init in output.admitted:
            self._digests[init.row] = _digest(init.token_ids)[0]
            self._adapter_seeds[init.row] = int(init.lora.digest[:16] or "0", 16) if init.lora is not None else 0
        for fork in output.forks:
            self._digests[fork.dst] = self._digests[fork.src]
            self._adapter_seeds[fork.dst] = self._adapter_seeds[fork.src]
        if self._step_s and not output.is_empty:
            time.sleep(self._step_s)
        rows = output.sample_rows
        positions = (output.start + output.num_new)[output.sample_index]
        if output.drafts:
            return self._verify(output, positions)
        tokens = self._tokens_of(rows)
        failed, refused = self._constrain(rows, positions, tokens)
        if failed:
            return self._without(failed, refused, output, positions, tokens)
        table.record_tokens(rows, positions, tokens)
        self._digests[rows] = _extend(self._digests[rows], tokens)
        return ModelRunnerOutput(output.step, tokens[:, None], np.ones(len(rows), np.int32), duration_s=self._step_s)

    def _tokens_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the next token of each row, int32 [num_rows]."""
        seeds = self._table.seeds[rows] ^ self._adapter_seeds[rows]
        return _tokens(self._digests[rows], seeds, self._vocab_size)

    def _with_pooled(self, result: ModelRunnerOutput, output: SchedulerOutput) -> ModelRunnerOutput:
        """Add vectors of unit length that depend on the tokens of the prompts that end in this step."""
        table, ends = self._table, output.start + output.num_new
        if not table.wants_states[output.rows].any():
            return result
        pooled: dict[int, np.ndarray] = {}
        for row, end in zip(output.rows.tolist(), ends.tolist(), strict=True):
            params = table.pooling[row]
            if params is not None and end == table.num_prompt[row]:
                size = params.dimensions or FAKE_EMBEDDING_SIZE
                vector = np.random.default_rng(int(self._digests[row])).standard_normal(size)
                pooled[row] = (vector / np.sqrt(np.dot(vector, vector))).astype(np.float32)
        return replace(result, pooled=pooled)

    def _constrain(
        self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[int, str], frozenset[int]]:
        """Replace tokens that a grammar forbids, in place. Return `failed` and `refused` of GrammarMasks."""
        pending = self._grammars.begin(self._table, rows, positions) if self._grammars is not None else None
        if pending is None:
            return {}, frozenset()
        masks = pending.result()
        for draw, mask in zip(masks.draws.tolist(), masks.bits, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size])
            if tokens[draw] not in allowed:
                tokens[draw] = allowed[tokens[draw] % len(allowed)]
        return masks.failed, masks.refused

    def _without(
        self,
        failed: dict[int, str],
        refused: frozenset[int],
        output: SchedulerOutput,
        positions: np.ndarray,
        tokens: np.ndarray,
    ) -> ModelRunnerOutput:
        """Return the result of a step in which some rows get no token."""
        rows = output.sample_rows
        kept = ~np.isin(rows, list(failed))
        self._table.record_tokens(rows[kept], positions[kept], tokens[kept])
        self._digests[rows[kept]] = _extend(self._digests[rows[kept]], tokens[kept])
        sampled = np.where(kept, tokens, -1)[:, None]
        return ModelRunnerOutput(
            output.step, sampled, kept.astype(np.int32), failed=failed, refused=refused, duration_s=self._step_s
        )

    def _verify(self, output: SchedulerOutput, ends: np.ndarray) -> ModelRunnerOutput:
        """Sample each row up to and including the first token that differs from its draft."""
        longest = 1 + max(len(drafts) for drafts in output.drafts.values())
        sampled = np.full((len(ends), longest), -1, np.int32)
        num_sampled = np.zeros(len(ends), np.int32)
        failed: dict[int, str] = {}
        refused: frozenset[int] = frozenset()
        for j, row in enumerate(output.sample_rows.tolist()):
            drafts = output.drafts.get(int(output.rows[output.sample_index[j]]), ())
            position = int(ends[j]) - len(drafts)
            for draft in (*drafts, None):
                token = self._tokens_of(np.array([row]))
                failed_here, refused_here = self._constrain(np.array([row]), np.array([position]), token)
                failed |= failed_here
                refused |= refused_here
                if row in failed:
                    break
                sampled[j, num_sampled[j]] = token[0]
                num_sampled[j] += 1
                self._table.record_tokens(np.array([row]), np.array([position]), token)
                self._digests[row] = _extend(self._digests[row : row + 1], token)[0]
                position += 1
                if draft is None or token[0] != draft:
                    break
        return ModelRunnerOutput(
            output.step, sampled, num_sampled, failed=failed, refused=refused, duration_s=self._step_s
        )
