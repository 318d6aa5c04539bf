"""Native linear layers next to what memory and arithmetic allow, by form of weights and number of rows.

    linear_roofline.py [--forms bf16 Q4_K] [--rows 1 2 4 8] [--shapes 1B 8B] [--threads 2] [--rounds 5]

Each figure is of weights larger than any cache, one layer after the other as a forward reads them. Before and after
each round a plain read of as many bytes is timed by the same threads: rounds in which it changed are left out. For more
rows than one, the least time is the larger of that and of the arithmetic, probed with weights that stay in the cache.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.compare import circumstances
from pagoda.kernels.linear.forms import GGUF_TYPES, Q4, Q4_ZERO, Q8, Offset, WeightFormat
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.native import library
from pagoda.kernels.native.huge_pages import huge_zeros
from pagoda.kernels.native_ops import NativeOps

SHAPES = {
    "1B": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}
_GGUF = ("Q8_0", "Q6_K", "Q5_0", "Q5_K", "Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "MXFP4")
FORMS: dict[str, WeightFormat | torch.dtype] = {
    "bf16": torch.bfloat16,
    "int8": WeightFormat(Q8, 64),
    **{name: GGUF_TYPES[name] for name in _GGUF},
    "AWQ": WeightFormat(Q4_ZERO, 32),
    "GPTQ": WeightFormat(Q4, 32),
}
"""What the native kernels hold; several names of one form are one row of the table."""
_LEAST_BYTES = 256 << 20
_DRIFT = 0.06  # rounds in which a plain read became so much faster or slower do not count


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians of the rounds that count.

    bits: of a weight as it is held, scales included.   gb_s: of weights.   read: of the plain read.
    share: of the least time.
    """

    bits: float
    gb_s: float
    read: float
    share: float
    rounds: int


def names_of_forms(wanted: Sequence[str]) -> dict[str, str]:
    """Return the forms to measure: what they are called together, and one of the names."""
    grouped: dict[object, list[str]] = {}
    for name in wanted:
        grouped.setdefault(FORMS[name], []).append(name)
    return {", ".join(names): names[0] for names in grouped.values()}


def prepare(ops: NativeOps, name: str, shape: tuple[int, int], copies: int) -> list[Any]:
    form = FORMS[name]
    if isinstance(form, torch.dtype):
        weight = torch.randn(shape).to(form)
        return [ops.prepare_linear(weight) for _ in range(copies)]
    kind, (rows, columns) = form.form, shape
    codes = torch.randint(0, 1 << kind.bits, shape, dtype=torch.uint8)
    scales, units = torch.full((rows, columns // (kind.sub_group or form.group)), 2**-7), None
    if kind.sub_group:
        scales = torch.full_like(scales, 9, dtype=torch.uint8)
        units = torch.full((rows, columns // form.group, 2 if kind.offset is Offset.MINIMUM else 1), 2**-10).half()
    zero_points = torch.full_like(scales, 7, dtype=torch.uint8)
    offsets = {Offset.MINIMUM: scales, Offset.ZERO_POINT: zero_points}.get(kind.offset)
    coded = QuantizedWeight(kind, codes, scales, offsets, columns, form.group, units=units)
    return [ops.prepare_quantized_linear(coded, torch.bfloat16) for _ in range(copies)]


class Reader:
    """Times a plain read by the kernels' threads: a search for the largest of float32 numbers."""

    def __init__(self, ops: NativeOps) -> None:
        flat = huge_zeros(_LEAST_BYTES).view(torch.float32)
        numbers = flat[: len(flat) // ops.threads * ops.threads].view(ops.threads, -1)
        self._numbers, self._ops = numbers.fill_(1), ops  # pages that are not written are all one page

    def gb_s(self) -> float:
        clock = clock_of(self._ops)
        begin = clock()
        self._ops.best_tokens(self._numbers)
        return self._numbers.nbytes / (clock() - begin) / 1e9


def clock_of(ops: NativeOps) -> Callable[[], float]:
    """Return what times are taken with: of one thread, the time it ran, which another process does not lengthen."""
    return time.thread_time if ops.threads == 1 else time.perf_counter


def multiply(ops: Any, x: torch.Tensor, weights: Sequence[Any]) -> float:
    """Return the seconds of one product with each weight."""
    clock = clock_of(ops)
    begin = clock()
    for weight in weights:
        ops.linear(x, weight)
    return clock() - begin


def arithmetic_s(ops: NativeOps, name: str, rows: int, columns: int) -> float:
    """Return the seconds per weight element of a product with weights that stay in the L2 cache.

    It is what four times as many output features cost more, so that the call itself does not count.
    """
    columns = min(columns, 512)
    x = torch.randn(rows, columns).bfloat16()
    narrow, wide = (
        min(multiply(ops, x, prepare(ops, name, (panels * 32 * ops.threads, columns), 1) * 100) for _ in range(9))
        for panels in (4, 16)
    )
    return max(wide - narrow, 0.0) / 100 / (12 * 32 * ops.threads * columns)


def measure(ops: NativeOps, reader: Reader, name: str, shape: tuple[int, int], rows: int, rounds: int) -> Figures:
    num_bytes = prepare(ops, name, shape, 1)[0].panels.nbytes
    weights = prepare(ops, name, shape, -(-_LEAST_BYTES // num_bytes))
    x = torch.randn(rows, shape[1]).bfloat16()
    compute = arithmetic_s(ops, name, rows, shape[1]) * shape[0] * shape[1] * len(weights) if rows > 1 else 0.0
    multiply(ops, x, weights)
    found: list[tuple[float, float, float]] = []
    for attempt in range(4 * rounds):
        before = reader.gb_s()
        secs = multiply(ops, x, weights)
        after = reader.gb_s()
        read = (before + after) / 2
        if abs(before - after) > _DRIFT * read and attempt < 3 * rounds:
            continue
        total = num_bytes * len(weights)
        found.append((total / secs / 1e9, read, max(total / read / 1e9, compute) / secs))
        if len(found) == rounds:
            break
    gb_s, read, share = (statistics.median(column) for column in zip(*found, strict=True))
    return Figures(8 * num_bytes / (shape[0] * shape[1]), gb_s, read, share, len(found))


def table(options: argparse.Namespace, emit: Callable[[str], None]) -> None:
    ops = NativeOps(library.load(), options.threads)
    reader = Reader(ops)
    reader.gb_s()
    where = ", ".join(circumstances().values())
    emit(f"{where}; {ops.library.isa}, {options.threads} threads; medians of {options.rounds} rounds\n")
    emit("| weights | bits held | model | layer | rows | GB/s | plain read | share of the least time |")
    emit("|---|---|---|---|---|---|---|---|")
    for title, name in names_of_forms(options.forms).items():
        for model, layer, shape in layers(options.shapes):
            for rows in options.rows:
                of = measure(ops, reader, name, shape, rows, options.rounds)
                emit(
                    f"| {title} | {of.bits:.2f} | {model} | {layer} {shape[0]} x {shape[1]} | {rows} | "
                    f"{of.gb_s:.1f} | {of.read:.1f} | {of.share:.0%} |"
                )


def layers(models: Sequence[str]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    for model in models:
        for layer, shape in SHAPES[model].items():
            yield model, layer, shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    table(parser.parse_args(), lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(main())
