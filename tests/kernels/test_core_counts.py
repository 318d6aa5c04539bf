"""benchmarks/core_counts.py next to what the thread pool counts."""

from collections.abc import Callable
from ctypes import addressof, c_int64
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks import core_counts
from benchmarks.make_random_model import Shape
from pagoda.kernels.linear.quantize import quantize
from pagoda.kernels.native_ops import NativeOps
from pagoda.ops.declare import Activation
from tests.kernels.paged import Geometry, make_metadata

LAYER = Shape(512, 4352, 1, 8, 2, 64, 1024, 2048, 10000.0)  # down: three segments along K
CONTEXT = 600


class Counts(NamedTuple):
    regions: int
    shares: int
    wakes: int
    taken_over: int


@pytest.fixture
def counted(native: NativeOps) -> Callable[[Callable[[], object]], Counts]:
    """Return a function that runs another and returns what the pool counted meanwhile."""

    def count(run: Callable[[], object]) -> Counts:
        def now() -> list[int]:
            counts = (c_int64 * 4)()
            native.library["pool_counts"](addressof(counts))
            return list(counts)

        before = now()
        run()
        return Counts(*(after - of for after, of in zip(now(), before, strict=True)))

    return count


@pytest.fixture(scope="module", params=[False, True], ids=["floats", "codes"])
def weights(request: pytest.FixtureRequest, native: NativeOps) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, (outputs, inputs, in_pairs) in core_counts.linear_sizes(LAYER).items():
        weight = torch.randn(outputs, inputs).bfloat16() / 50
        if request.param:
            made[name] = native.prepare_quantized_linear(quantize(weight), weight.dtype, None, in_pairs)
        else:
            made[name] = native.prepare_stacked([weight], None, in_pairs)
    return made


def decode(ops: Any, weights: dict[str, Any], rows: int) -> Callable[[], None]:
    """Return a function that computes one decoder layer for rows of CONTEXT tokens each."""
    shape, dtype = LAYER, torch.bfloat16
    heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    geometry = Geometry(heads, kv_heads, dim, 16, dtype)
    blocks = -(-CONTEXT // 16)
    cache = geometry.new_cache(blocks * rows)
    tables = [list(range(1 + blocks * row, 1 + blocks * (row + 1))) for row in range(rows)]
    metadata = make_metadata(geometry, [(CONTEXT - 1, 1)] * rows, tables)
    positions, angles = torch.full((rows,), CONTEXT - 1), torch.ones(CONTEXT, dim // 2)
    x, norm = torch.randn(rows, shape.hidden_size).to(dtype), torch.ones(shape.hidden_size, dtype=dtype)

    def run() -> None:
        normed = ops.rms_norm(x, norm, 1e-5)
        q, k, v = ops.split_qkv(ops.linear(normed, weights["qkv"]), heads, kv_heads, dim)
        rotated = ops.rotary_write_kv(q, k, v, positions.int(), angles, angles, cache, metadata)
        y = ops.linear(ops.attention(rotated, cache, metadata, 0.125), weights["o"])
        normed, _ = ops.add_rms_norm(y, x, norm, 1e-5)
        ops.linear(ops.linear_gate(normed, weights["gate_up"], Activation.SILU), weights["down"])

    return run


@pytest.mark.parametrize("threads", [1, 2, 3, 17, 64])
def test_a_layer_has_the_regions_and_shares_of_the_model(
    native: NativeOps, weights: dict[str, Any], counted: Callable[[Callable[[], object]], Counts], threads: int
) -> None:
    converts = weights["o"].dtype is None or native.library.isa != "avx512_bf16"
    ops = NativeOps(native.library, threads)
    for rows in (1, 4, 15):
        run = decode(ops, weights, rows)
        found = counted(run)
        modelled = core_counts.count(core_counts.of_layer(LAYER, rows, CONTEXT, threads, converts))
        assert (found.regions, found.shares) == (modelled.regions, modelled.shares), rows
        assert found.taken_over <= found.shares - found.regions


def test_the_table_in_the_docs_is_what_is_counted(native: NativeOps) -> None:
    page = (Path(__file__).parents[2] / "docs" / "internals" / "kernels.md").read_text()
    assert "\n".join(core_counts.table(list(core_counts.NAMES), [1, 8], [8, 16, 32, 64, 128], converts=False)) in page


def test_threads_are_woken_once_when_a_step_begins(
    native: NativeOps, counted: Callable[[Callable[[], object]], Counts]
) -> None:
    """All that sleep are, by threads that are awake; a thread that is still awake need not be."""
    library = native.library
    for threads in (2, 5, 20):
        library["shares_done"](threads)
        found = counted(lambda threads=threads: library["shares_done"](threads))
        assert found.wakes <= threads - 1
        assert (found.regions, found.shares) == (1, threads)
