"""How decoding and prompts scale with cores: decoder layers of the 1B and 8B shapes on 1, 2, 4, 8 and 16 threads.

    cores.py [--shapes 1B 8B] [--forms bf16 int8 Q4_K] [--threads 1 2 4 8 16] [--rounds 3]

One command, about three minutes; of the numbers of threads, those that the machine has cores for. Next to each, what
the same threads reach of plain reads of memory and of arithmetic on weights in their caches. The layers' weights are
larger than any cache; a step is one call, as on a server. `core_counts.py` counts what a step costs on more cores.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.compare import circumstances
from benchmarks.core_counts import NAMES, linear_sizes
from benchmarks.linear_roofline import Reader, arithmetic_s, prepare
from benchmarks.make_random_model import SHAPES, Shape
from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, KVLayer, OutputRows
from pagoda.kernels.native import library
from pagoda.kernels.native.threads import available_cpus
from pagoda.kernels.native_ops import NativeOps
from pagoda.ops.declare import Activation
from pagoda.worker.forward_runner import ForwardRunner, Programs

_FORMS = ("bf16", "int8", "Q4_K")
_LEAST_BYTES = 512 << 20  # of weights that a decode reads
_CONTEXT, _PROMPT, _BLOCK = 512, 256, 16
_PROBED_ROWS = 48


class Layers:
    """Decoder layers of a shape, without embedding and head; each has weights of its own."""

    generates, num_token_types = False, 0

    def __init__(self, ops: NativeOps, shape: Shape, form: str) -> None:
        self.shape = shape
        sizes = {name: (outputs, inputs) for name, (outputs, inputs, _) in linear_sizes(shape).items()}
        once = {name: prepare(ops, form, size, 1)[0] for name, size in sizes.items()}
        self.layer_bytes = sum(weight.panels.nbytes for weight in once.values())
        count = -(-_LEAST_BYTES // self.layer_bytes)
        others = {name: prepare(ops, form, size, count - 1) for name, size in sizes.items()}
        self.layers = [once] + [{name: others[name][i] for name in sizes} for i in range(count - 1)]
        self.norm = torch.ones(shape.hidden_size).bfloat16()
        self.angles = torch.ones(_CONTEXT + 1, shape.head_dim // 2)
        self.table = torch.randn(16, shape.hidden_size).bfloat16()

    def forward(self, ops: Any, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Any:
        shape, cache, metadata = self.shape, kv[0], batch.metadata[0]
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        x = ops.embedding(batch.token_ids, self.table)
        y, residual = ops.rms_norm(x, self.norm, 1e-5), x
        for weights in self.layers[: batch.num_layers or None]:
            q, k, v = ops.split_qkv(ops.linear(y, weights["qkv"]), *heads)
            q = ops.rotary_write_kv(q, k, v, batch.positions, self.angles, self.angles, cache, metadata)
            y = ops.linear(ops.attention(q, cache, metadata, shape.head_dim**-0.5), weights["o"])
            y, residual = ops.add_rms_norm(y, residual, self.norm, 1e-5)
            y = ops.linear(ops.gate(ops.linear(y, weights["gate_up"]), Activation.SILU), weights["down"])
            y, residual = ops.add_rms_norm(y, residual, self.norm, 1e-5)
        return y


def batch_of(rows: int, computed: int, new: int, num_layers: int = 0) -> ForwardBatch:
    """Return a batch of rows with `computed` tokens in the cache and `new` ones."""
    blocks = (computed + new + _BLOCK - 1) // _BLOCK
    table = (torch.arange(rows * blocks).view(rows, blocks) + 1).int()
    positions = torch.arange(computed, computed + new).repeat(rows)
    slots = (table[:, (positions[:new] // _BLOCK)].long() * _BLOCK + positions[:new] % _BLOCK).flatten()
    starts = torch.arange(rows + 1, dtype=torch.int32)
    lens = torch.full((rows,), computed + new, dtype=torch.int32)
    metadata = AttentionMetadata(starts * new, lens, table, slots, _BLOCK, new, computed + new)
    of_outputs = AttentionMetadata(starts, lens, table, slots, _BLOCK, 1, computed + new)
    ids, ends = torch.arange(rows * new) % 16, (starts[1:] * new - 1).long()
    return ForwardBatch(
        ids.int(), positions.int(), (metadata,), OutputRows(ends, (of_outputs,)), torch.arange(rows), {}, num_layers
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second of a whole model's layers, and what the same threads reach of plain reads and of arithmetic.

    read, gflops: probed.   of_read: of decode1, GB/s of weights by those.   of_gflops: of the prompt.
    """

    decode1: float
    decode8: float
    prompt: float
    read: float
    gflops: float
    of_read: float
    of_gflops: float


def fastest(run: Callable[[], object], rounds: int) -> float:
    run()
    times: list[float] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(model: Layers, form: str, threads: int, rounds: int) -> Figures:
    shape, ops = model.shape, NativeOps(library.load(), threads)
    runner = ForwardRunner(model, ops, recorder=Programs(ops))  # type: ignore[arg-type]
    pages = (8 * (_CONTEXT // _BLOCK + 1) + 1, shape.num_key_value_heads, _BLOCK, shape.head_dim)
    kv = [KVLayer(torch.zeros(pages).bfloat16(), torch.zeros(pages).bfloat16())]

    def layer_s(rows: int, computed: int, new: int, num_layers: int = 0) -> float:
        batch = batch_of(rows, computed, new, num_layers)
        return fastest(lambda: runner.run(batch, kv), rounds) / (num_layers or len(model.layers))

    reader = Reader(ops)
    read = statistics.median(reader.gb_s() for _ in range(3))
    # On a busy machine, the difference that is probed may be lost.
    gflops = 2e-9 * _PROBED_ROWS / (arithmetic_s(ops, form, _PROBED_ROWS, shape.hidden_size) or math.nan)
    decode1, decode8, prompt = layer_s(1, _CONTEXT - 1, 1), layer_s(8, _CONTEXT - 1, 1), layer_s(1, 0, _PROMPT, 1)
    products = sum(outputs * inputs for outputs, inputs, _ in linear_sizes(shape).values())
    return Figures(
        1 / decode1 / shape.num_hidden_layers,
        8 / decode8 / shape.num_hidden_layers,
        _PROMPT / prompt / shape.num_hidden_layers,
        read,
        gflops,
        model.layer_bytes / decode1 / 1e9 / read,
        2e-9 * products * _PROMPT / prompt / gflops,
    )


def main() -> None:
    cores = available_cpus()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=list(_FORMS))
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[count for count in (1, 2, 4, 8, 16) if count <= cores]
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{', '.join(circumstances().values())}; {library.load().isa}, {cores} cores; fastest of {args.rounds}\n")
    print(
        "| shape | weights | threads | plain read, GB/s | arithmetic, GFLOP/s | decode1, tokens/s | of the read ",
        end="",
    )
    print("| decode8 | prompt | of the arithmetic |")
    print("|---" * 10 + "|", flush=True)
    for name in args.shapes:
        for form in args.forms:
            model = Layers(NativeOps(library.load(), max(args.threads)), SHAPES[NAMES[name]], form)
            for threads in args.threads:
                of = measure(model, form, threads, args.rounds)
                probed, decoded = f"{of.read:.0f} | {of.gflops:.0f}", f"{of.decode1:.1f} | {of.of_read:.0%}"
                print(f"| {name} | {form} | {threads} | {probed} | {decoded} ", end="")
                print(f"| {of.decode8:.1f} | {of.prompt:.0f} | {of.of_gflops:.0%} |", flush=True)


if __name__ == "__main__":
    main()
