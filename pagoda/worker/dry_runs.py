"""Steps computed before the first request, to compile kernels, to time them and to measure the memory they take."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import AdmitKind
from pagoda.core.scheduler_output import RowInit, SchedulerOutput
from pagoda.worker.batch_rows import PaddedSize, Padding
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.forward_runner import Computed, ForwardRunner
from pagoda.worker.sampler import Sampler, prompt_logprobs
from pagoda.worker.staging import StepInputs
from pagoda.worker.table_mirror import TableMirror

_PENALIZED_IDS = 4096
"""Distinct tokens of a row. More are possible, but then not in all rows at once."""

_COSTLY = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
    logprobs=20, prompt_logprobs=20,
)  # fmt: skip
_COSTLY_WITHOUT_LOGPROBS = SamplingParams(temperature=1.0, repetition_penalty=1.1)


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """The limits of steps.

    max_rows: sequences that run at once.   max_tokens: per step.   max_len: of a sequence.
    vocab_size, num_groups: of the model.   num_drafts: most per row.   samples: the model generates text.
    """

    max_rows: int
    max_tokens: int
    max_len: int
    vocab_size: int
    num_groups: int = 1
    num_drafts: int = 0
    samples: bool = True

    def __iter__(self) -> Iterator[SchedulerOutput]:
        yield self.prompts()
        if self.samples:
            yield self.mixed()
            yield self.decodes(min(self.max_rows, self.max_tokens))

    def prompts(self) -> SchedulerOutput:
        """Return a step of as many new tokens as there can be, in whole prompts as far as possible."""
        num_new: list[int] = []
        left = self.max_tokens
        while left and len(num_new) < self.max_rows:
            num_new.append(min(left, self.max_len))
            left -= num_new[-1]
        return self._step([0] * len(num_new), num_new)

    def mixed(self, most_tokens: int | None = None) -> SchedulerOutput:
        """Return a step of the longest chunk that ends a prompt, next to as many decodes as there can be.

        most_tokens: of the step, if it is not to have as many as there can be.
        """
        num_tokens = self.max_tokens if most_tokens is None else min(self.max_tokens, most_tokens)
        num_decodes = min(self.max_rows - 1, num_tokens // 2)
        chunk = min(self.max_len, num_tokens - num_decodes)
        return self._step([self.max_len - 1] * num_decodes + [self.max_len - chunk], [1] * num_decodes + [chunk])

    def decodes(self, num_rows: int, num_drafts: int | None = None) -> SchedulerOutput:
        """Return a step that decodes rows at their longest.   num_drafts: of each row; None: as many as can be."""
        if num_drafts is None:
            num_drafts = self.most_drafts(num_rows)
        return self._step([self.max_len - 1 - num_drafts] * num_rows, [1 + num_drafts] * num_rows, num_drafts)

    def most_drafts(self, num_rows: int) -> int:
        """Return how many drafts each of so many rows can have in a step."""
        return min(self.num_drafts, self.max_len - 1, self.max_tokens // num_rows - 1)

    def _step(self, start: list[int], num_new: list[int], num_drafts: int = 0) -> SchedulerOutput:
        """Return a step of the first rows of the table, all of which sample, and all but the last with logprobs."""
        rows, begin, count = (np.array(column, np.int32) for column in (range(len(start)), start, num_new))
        tokens = (np.arange(self.max_len) % min(self.vocab_size, _PENALIZED_IDS)).astype(np.int32)
        no_blocks = tuple(np.empty(0, np.int32) for _ in range(self.num_groups))
        admitted: list[RowInit] = []
        for row, (at, new) in enumerate(zip(start, num_new, strict=True)):
            known = tokens[: at + new - num_drafts]
            is_prompt = new > 1 + num_drafts
            sampling = _COSTLY if row == 0 or row < len(start) - 1 else _COSTLY_WITHOUT_LOGPROBS
            init = RowInit(row, "", 0, AdmitKind.NEW, known, len(known) if is_prompt else 1, at, no_blocks, seed=0)
            admitted.append(replace(init, sampling=sampling if self.samples else None))
        drafts = dict.fromkeys(range(len(start)), tokens[:num_drafts]) if num_drafts else {}
        return SchedulerOutput(
            0, rows, begin, count, rows, rows, int(count.sum()), admitted=tuple(admitted), drafts=drafts
        )


def largest_graphs(steps: LargestSteps, padding: Padding) -> set[tuple[int, int]]:
    """Return the rows, and the drafts of each, of the steps that are captured with most rows and with most tokens."""
    found: dict[tuple[int, int], PaddedSize] = {}
    for num_rows in range(1, min(steps.max_rows, steps.max_tokens) + 1):
        for num_drafts in range(steps.most_drafts(num_rows) + 1):
            per_row = 1 + num_drafts
            size = padding.size_of(num_rows, num_rows * per_row, per_row, steps.max_len)
            if size is not None:
                found[num_rows, num_drafts] = size
    most_rows = max(at for at in found if not at[1])
    most_tokens = max(found, key=lambda at: (found[at].num_tokens, at[1], at[0]))
    return {most_rows, most_tokens}


class DryRuns:
    """Computes steps without keeping their results.

    Rows without blocks write to the null block, which no sequence reads.
    """

    def __init__(self, forward: ForwardRunner, table: TableMirror, cache: CacheEngine) -> None:
        self._forward = forward
        self._table = table
        self._cache = cache
        self._sampler = Sampler(forward.ops)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> None:
        """Apply a step's events and compute it, with all that is sampled and reported."""
        self._table.apply(output)
        inputs, (hidden, logits) = self._computed(output)
        if logits is None:
            return
        draws = inputs.draw_rows, inputs.draw_positions
        self._sampler.draw(inputs.logits_of_draws(logits), self._table, *draws, None, inputs.draw_params)
        del logits
        if inputs.prompt_rows:
            states = self._forward.states_of(inputs, hidden)
            prompt_logprobs(inputs, states, self._table, self._forward)

    @torch.inference_mode()
    def run_tokens(self, num_tokens: int, max_per_row: int, start: int) -> None:
        """Compute a step over this many tokens and wait for its logits.

        max_per_row: tokens, all but the first of them drafts.   start: position of each row's first token.
        """
        counts = np.diff(np.append(np.arange(0, num_tokens, max_per_row), num_tokens)).astype(np.int32)
        rows = np.arange(len(counts), dtype=np.int32)
        drafts = {row: np.zeros(count - 1, np.int32) for row, count in enumerate(counts.tolist()) if count > 1}
        begin = np.full_like(rows, start)
        output = SchedulerOutput(0, rows, begin, counts, rows, rows, num_tokens, drafts=drafts)
        self._table.token_ids[rows, start : start + int(counts[0])] = 0
        _, computed = self._computed(output)
        if computed.logits is not None:
            computed.logits[-1, -1].item()

    def _computed(self, output: SchedulerOutput) -> tuple[StepInputs, Computed]:
        """Compute a step's forward; return its inputs, too."""
        inputs = self._forward.staging.fill(self._table, output)
        return inputs, self._forward.run(inputs.batch, self._cache.layers, inputs.size)
