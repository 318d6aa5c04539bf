"""What Triton would compile and launch on a GPU while it serves; to be run with TRITON_INTERPRET=0, and without a GPU.

Prints JSON: "kernels", how often Triton compiles each kernel over many batches; "grids", the largest of the three
dimensions in the largest steps.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.kernel_report import (
    BF16,
    cache_of,
    metadata_of,
    recorded_launches,
    symmetric_gptq,
    with_zero_points,
)
from pagoda.kernels.linear.quantize import Fp8Weight
from pagoda.kernels.low_rank.table import LowRankPiece
from pagoda.kernels.moe import reference as reference_moe
from pagoda.kernels.moe import triton_moe
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.kernels.triton_ops import TritonOps
from pagoda.ops.declare import Activation
from pagoda.worker.batch_rows import padded_context, padded_rows
from tests.kernels.test_constraints import random_constraints

MAX_MODEL_LEN = 40_960
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 16, 8, 128, 256, 1003
Rows = tuple[list[int], int]  # the query length of each, and the longest context


class Layers:
    """A small model's ops: all kinds of layers, once each."""

    def __init__(self, batch_invariant: bool = False) -> None:
        self.ops: Any = TritonOps(MAX_MODEL_LEN, batch_invariant, multiplies_fp8=True)
        self._cache = cache_of(BF16)
        self._norm = torch.zeros(HIDDEN, dtype=BF16)
        self._rotary = torch.zeros(64, HEAD_DIM // 2), torch.zeros(64, HEAD_DIM // 2)
        fp8 = Fp8Weight(torch.zeros(512, HIDDEN, dtype=torch.float8_e4m3fn), torch.zeros(512))
        coded = fp8, symmetric_gptq(512, HIDDEN, 128), with_zero_points(512, HIDDEN, 128)
        self._coded = [self.ops.prepare_quantized_linear(weight, BF16) for weight in coded]
        self._plain = self._linear(512, HIDDEN)
        self._head = self._linear(VOCAB, HIDDEN)
        shapes = (512, HIDDEN), (HIDDEN, HIDDEN)
        self._experts = [self.ops.prepare_experts([self._linear(*shape)] * 4) for shape in shapes]
        self._adapter = self.ops.make_low_rank_table(2, HIDDEN, HIDDEN, BF16)
        self._adapter.fill(1, [LowRankPiece(torch.zeros(16, HIDDEN), torch.zeros(HIDDEN, 16))])

    def _linear(self, out_features: int, in_features: int) -> Any:
        return self.ops.prepare_linear(torch.zeros(out_features, in_features, dtype=BF16))

    def run(self, query_lens: list[int], longest: int) -> None:
        tokens, ops = sum(query_lens), self.ops
        metadata = metadata_of(query_lens, longest, 16)
        positions = torch.zeros(tokens, dtype=torch.int32)
        x = torch.zeros(tokens, HIDDEN, dtype=BF16)
        ops.add_rms_norm(x, x, self._norm, 1e-6)
        qkv = torch.zeros(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=BF16)
        q, k, v = ops.split_qkv(qkv, HEADS, KV_HEADS, HEAD_DIM)
        ops.attention(ops.rotary_write_kv(q, k, v, positions, *self._rotary, self._cache, metadata), self._cache,
                      metadata, 0.1)  # fmt: skip
        for weight in (*self._coded, self._plain):
            ops.linear(x, weight)
        ops.gate(torch.zeros(tokens, 2 * HIDDEN, dtype=BF16), Activation.SILU)
        router = torch.zeros(tokens, 4, dtype=BF16)
        triton_moe.route(router, 2, True)
        # By torch, so that the experts exist: what a launch that is recorded and not run gives is undefined.
        ops.moe(x, *reference_moe.route(router, 2, True), *self._experts)
        ops.add_low_rank(x, x, torch.ones_like(positions), self._adapter)
        ops.logits(x[: len(query_lens)], self._head)

    def sample(self, num_rows: int, vocab: int = VOCAB, most_logprobs: Sequence[int] = (0, 1, 5, 16, 20)) -> None:
        logits, ones = torch.empty(num_rows, vocab), np.ones(num_rows, np.float32)
        params = DrawParams(ones, np.full(num_rows, 9, np.int32), ones / 2, ones / 50, ones.astype(np.float64) / 2)
        self.ops.sample(logits, params, self.ops.best_tokens(logits))
        for k in most_logprobs:
            self.ops.top_logprobs(logits, torch.zeros(num_rows, dtype=torch.int64), k)


def batches(count: int) -> Iterator[Rows]:
    """Decodes as they are recorded in graphs, and prompts, chunks, drafts and decodes together."""
    rng = random.Random(0)
    for _ in range(count):
        num_rows = rng.choice([1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 32, 33, 64, 100])
        longest = rng.choice([rng.randint(700, 2000), rng.randint(700, MAX_MODEL_LEN)])
        if rng.random() < 0.5:
            yield [1] * padded_rows(num_rows), padded_context(longest, MAX_MODEL_LEN)
        else:
            yield [rng.choice([1, 1, 5, rng.randint(2, 600)]) for _ in range(num_rows)], longest


def compiled_while_serving() -> dict[str, int]:
    with recorded_launches() as launches:
        for layers in (Layers(), Layers(batch_invariant=True)):
            for query_lens, longest in batches(25):
                layers.run(query_lens, longest)
                layers.sample(len(query_lens))
            for seed in range(20):
                constraints = random_constraints(np.random.default_rng(seed), 1 + seed % 5, VOCAB)
                layers.ops.constrain(torch.zeros(1 + seed % 5, VOCAB), constraints)
    return dict(Counter(launch.function.__name__ for launch in launches))


def largest_grids() -> list[int]:
    """Of a prompt of 128 Ki tokens, of 8,192 decodes with a vocabulary of 256 Ki, and of 30,000 moved blocks.

    Without the products and the search for the best that torch would compute, which take half a minute.
    """
    layers = Layers()
    products = patch.object(F, "linear", lambda x, weight, _: x.new_empty(len(x), len(weight)))
    with recorded_launches() as launches, products:
        layers.run([2**17], 2**17)
        layers.run([1] * 8192, MAX_MODEL_LEN)
        layers.sample(8192, 2**18, [0])
        layers.sample(8192, VOCAB, [20])
        blocks = layers.ops.make_device_blocks([torch.empty(2, 64 * 128 * 32, dtype=BF16) for _ in range(2 * 80)])
        blocks.copy(np.stack([np.arange(30_000), np.arange(30_000, 60_000)], 1).astype(np.int32))
    grids = [(*grid, 1, 1)[:3] for launch in launches for grid in launch.grids]
    # Triton counts the programs of a grid in 32 bits, too, and launches nothing if the number overflows.
    return [*(max(sizes) for sizes in zip(*grids, strict=True)), max(x * y * z for x, y, z in grids)]


if __name__ == "__main__":
    print(json.dumps({"kernels": compiled_while_serving(), "grids": largest_grids()}))
