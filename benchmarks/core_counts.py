"""What one decode step costs on many cores, counted: parallel regions, their shares, and panels per thread.

    core_counts.py [--shapes 1B 8B] [--rows 1 8] [--cores 8 16 32 64 128] [--converts]

A model, not a measurement: it follows from shapes alone, and `tests/kernels/test_core_counts.py` holds it to what the
thread pool counts on the machine at hand, on any number of threads.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_int64
from dataclasses import dataclass

from benchmarks.make_random_model import SHAPES, Shape
from pagoda.kernels.native import library
from pagoda.kernels.native.abi import PackedLinear

NAMES = {"1B": "llama-3.2-1b", "8B": "llama-3.1-8b"}
ELEMENTS_PER_THREAD = 8192  # native/parallel.h
_SEGMENT = 256  # positions of a context: attention/segments.h


@dataclass(frozen=True, slots=True)
class Region:
    """One parallel region: the op that has it, and its threads, the caller included."""

    op: str
    threads: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer's plan on some threads: linear/plan.h.

    busiest: panels (of a gate pairs) of the thread that has most, a segment being a part of one.
    """

    name: str
    panels: int
    segments: int
    threads: int

    @property
    def busiest(self) -> float:
        return -(-self.panels * self.segments // self.threads) / self.segments

    @property
    def balance(self) -> float:
        """How much of the threads' time is work if each panel takes as long: what one has on average of what most."""
        return self.panels / self.threads / self.busiest


def threads_for(elements: int, threads: int, pieces: int = sys.maxsize) -> int:
    return max(1, min(threads, pieces, elements // ELEMENTS_PER_THREAD))


def linear_sizes(shape: Shape) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs, and whether outputs are gates and what they multiply, of a layer's matrices."""
    hidden, inner, q = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads * shape.head_dim
    return {
        "qkv": (q + 2 * shape.num_key_value_heads * shape.head_dim, hidden, False),
        "o": (hidden, q, False),
        "gate_up": (2 * inner, hidden, True),
        "down": (hidden, inner, False),
    }


def planned(name: str, outputs: int, inputs: int, in_pairs: bool, threads: int) -> Layer:
    record, plan = PackedLinear(None, None, outputs, inputs, in_pairs=in_pairs), (c_int64 * 3)()
    library.load()["linear_plan"](addressof(record), threads, addressof(plan))
    return Layer(name, *plan)


def layers(shape: Shape, threads: int) -> list[Layer]:
    return [planned(name, *sizes, threads) for name, sizes in linear_sizes(shape).items()]


def of_linear(layer: Layer, rows: int, inputs: int, converts: bool, threads: int) -> Iterator[Region]:
    """Yield a linear layer's regions for up to 15 rows: x is converted first, if its form needs that."""
    if converts:
        yield Region(f"{layer.name}: x", threads_for(rows * inputs, threads, rows * -(-inputs // 2048)))
    yield Region(layer.name, layer.threads)


def of_layer(shape: Shape, rows: int, context: int, threads: int, converts: bool) -> list[Region]:
    """Return the regions of one decoder layer in a decode step of rows that all have `context` tokens."""
    hidden, dim, heads = shape.hidden_size, shape.head_dim, shape.num_attention_heads
    kv_heads = shape.num_key_value_heads
    plans = {layer.name: layer for layer in layers(shape, threads)}
    inputs = {name: sizes[1] for name, sizes in linear_sizes(shape).items()}

    def linear(name: str) -> Iterator[Region]:
        return of_linear(plans[name], rows, inputs[name], converts, threads)

    # A row's positions are multiplied with q, and with their weights, in every head: a fourth of an element each.
    attended = threads_for(rows * 2 * context * heads * dim // 4, threads, rows * kv_heads * -(-context // _SEGMENT))
    return [
        Region("norm", threads_for(rows * hidden, threads, rows)),
        *linear("qkv"),
        Region("write k and v", threads_for(2 * rows * kv_heads * dim, threads, rows)),
        Region("rotate q", threads_for(rows * heads * dim, threads, rows)),
        Region("attention", attended),
        *linear("o"),
        Region("norm", threads_for(rows * hidden, threads, rows)),
        *linear("gate_up"),
        *linear("down"),
    ]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step costs. regions: with more than one thread.   shares: of all regions, the caller's included.

    A share is one cache line that is written for the region itself: the caller's begins it, each other's is its end.
    wakes: if every thread sleeps when the step begins.
    """

    regions: int
    shares: int
    wakes: int


def count(regions: list[Region]) -> StepCounts:
    parallel = [region.threads for region in regions if region.threads > 1]
    return StepCounts(len(parallel), sum(parallel), max(parallel, default=1) - 1)


def of_step(shape: Shape, rows: int, context: int, threads: int, converts: bool) -> StepCounts:
    """Return the counts of a whole step: its layers, the last norm and the output head."""
    head = planned("head", shape.vocab_size, shape.hidden_size, False, threads)
    regions = of_layer(shape, rows, context, threads, converts) * shape.num_hidden_layers
    regions.append(Region("norm", threads_for(rows * shape.hidden_size, threads, rows)))
    regions += of_linear(head, rows, shape.hidden_size, converts, threads)
    return count(regions)


def table(shapes: Sequence[str], rows: Sequence[int], cores: Sequence[int], converts: bool) -> Iterator[str]:
    """Yield the lines of a table: a step with contexts of 1,024 tokens, and panels of the thread that has most.

    In brackets, how much of the threads' time is work, where that is not all of it.
    """
    counted = [column for count in rows for column in (f"regions, {count} {'row' if count == 1 else 'rows'}", "shares")]
    columns = ["shape", "cores", *counted, "qkv", "o", "gate_up, pairs", "down"]
    yield from ("| " + " | ".join(columns) + " |", "|---" * len(columns) + "|")
    for name in shapes:
        shape = SHAPES[NAMES[name]]
        for threads in cores:
            steps = [of_step(shape, count, 1024, threads, converts) for count in rows]
            numbers = [f"{number:,}" for step in steps for number in (step.regions, step.shares)]
            plans = [_in_words(layer, threads) for layer in layers(shape, threads)]
            yield "| " + " | ".join([name, str(threads), *numbers, *plans]) + " |"


def _in_words(layer: Layer, threads: int) -> str:
    of_threads = f" of {layer.threads} threads" if layer.threads < threads else ""
    return f"{layer.busiest:g}{of_threads}" + (f" ({layer.balance * 100:.0f} %)" if layer.balance < 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--cores", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--converts", action="store_true", help="x is quantised or widened, as for codes")
    args = parser.parse_args()
    print("\n".join(table(args.shapes, args.rows, args.cores, args.converts)))


if __name__ == "__main__":
    main()
