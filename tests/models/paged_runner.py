"""PagedRunner: a model on a paged cache, driven by hand. What the worker does in batches, said as plainly as can be."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, OutputRows
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.forward_runner import Computed, ForwardRunner
from tests.device_under_test import made, moved

CPU = torch.device("cpu")


class PagedRunner:
    """Rows of tokens over a pool of blocks, which all KV groups share as they do in the engine, and one of states.

    dtype: of the cache.   device: where the model is; results are on the CPU.
    Blocks are dealt in a shuffled order. Block 0 is full of NaN, and is in the tables wherever a window has passed.
    """

    def __init__(
        self,
        model: ForwardRunner,
        num_rows: int,
        max_len: int,
        dtype: torch.dtype,
        block_size: int = 4,
        device: torch.device = CPU,
    ) -> None:
        self.model, groups = model, model.model.kv_groups
        self.block_size = block_size
        blocks_per_row = -(-max_len // block_size)
        num_blocks = len(groups) * num_rows * blocks_per_row
        cache = CacheEngine(groups, block_size, num_blocks, 0, dtype, made(device), num_states=num_blocks)
        self.kv = cache.layers
        self._device = device
        for layer in self.kv:
            for plane in (layer.k, layer.v) if layer.k_scale is None else (layer.k_scale, layer.v_scale):
                assert plane is not None
                plane[0] = float("nan")
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).int() + 1
        self.tables = order.view(len(groups), num_rows, blocks_per_row)

    def hidden(
        self, work: Sequence[tuple[int, int, Sequence[int]]], wanted: Sequence[int] | None = None
    ) -> torch.Tensor:
        """One step: for each (row, tokens before, new tokens) its last hidden states, as many as `wanted`, else one."""
        return self._run(work, wanted).hidden.cpu()

    def logits(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> torch.Tensor:
        """As `hidden`, float32 [len(work), vocab]."""
        logits = self._run(work, None).logits
        assert logits is not None
        return logits.cpu()

    def _run(self, work: Sequence[tuple[int, int, Sequence[int]]], wanted: Sequence[int] | None) -> Computed:
        positions = [torch.arange(start, start + len(tokens)) for _, start, tokens in work]
        lengths = torch.tensor([len(tokens) for _, _, tokens in work])
        query_start = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int()
        seq_lens = torch.tensor([start + len(tokens) for _, start, tokens in work], dtype=torch.int32)
        metadata, block_size = [], self.block_size
        for group, tables in zip(self.model.model.kv_groups, self.tables, strict=True):
            table = torch.stack([tables[row] for row, _, _ in work])
            slots = [
                table[index][at // block_size].long() * block_size + at % block_size
                for index, at in enumerate(positions)
            ]
            for index, (_, start, _) in enumerate(work):
                if group.window:
                    table[index, : max(0, start - group.window + 1) // block_size] = 0
            longest = int(lengths.max()), int(seq_lens.max())
            metadata.append(AttentionMetadata(query_start, seq_lens, table, torch.cat(slots), block_size, *longest))
        token_ids = torch.tensor([token for _, _, tokens in work for token in tokens], dtype=torch.int32)
        counts = torch.tensor(wanted or [1] * len(work))
        rows = counts.nonzero().squeeze(1)
        start = torch.cat((torch.zeros(1, dtype=torch.long), counts[rows].cumsum(0)))
        ends = [
            torch.arange(end - count, end) for end, count in zip(query_start[1:].tolist(), counts.tolist(), strict=True)
        ]
        asking = [
            replace(
                group,
                query_start=start.int(),
                seq_lens=group.seq_lens[rows],
                block_table=group.block_table[rows],
                max_query_len=int(counts.max()),
            )
            for group in metadata
        ]
        outputs = OutputRows(torch.cat(ends), tuple(asking))
        batch = ForwardBatch(
            token_ids, torch.cat(positions).int(), tuple(metadata), outputs, torch.arange(len(outputs.index))
        )
        return self.model.run(moved(batch, self._device), self.kv)


def generate(runner: PagedRunner, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int) -> list[list[int]]:
    """Return greedy answers of `num_tokens` each. Prompts take `chunk` tokens per step, next to rows that decode.

    Row i enters at step i, so every mixture of prefill and decode occurs.
    """
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    wanted = [len(prompt) + num_tokens for prompt in prompts]
    step = 0
    while any(len(tokens) < want for tokens, want in zip(known, wanted, strict=True)):
        rows = [row for row in range(len(known)) if row <= step and len(known[row]) < wanted[row]]
        work = [(row, computed[row], known[row][computed[row] : computed[row] + chunk]) for row in rows]
        logits = runner.logits(work) if work else torch.empty(0)
        for (row, start, tokens), scores in zip(work, logits, strict=True):
            computed[row] = start + len(tokens)
            if computed[row] == len(known[row]):
                known[row].append(int(scores.argmax()))
        step += 1
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
