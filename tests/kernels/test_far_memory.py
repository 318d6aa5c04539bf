"""Kernels in tensors of more than 2^31 elements, in Triton's interpreter: offsets must be computed in 64 bits.

The interpreter computes in the types that a GPU would, and address space that nothing is written to costs no memory.
Where a tensor cannot be strided, only the last program of a launch is run, on its last row.
"""

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.kernels.batch import KVLayer
from pagoda.kernels.linear.forms import Q4
from pagoda.kernels.linear.library import LibraryLinear
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.low_rank.table import LowRankPiece
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.ops.declare import Activation
from tests.kernels.paged import Geometry, make_metadata
from tests.kernels.test_constraints import random_constraints

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="address space on a GPU is memory")

BF16, F32 = torch.bfloat16, torch.float32
FAR = 2**30  # elements between rows, blocks or experts: the third of them is past 2^31


def lazy(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Zeros without memory, until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python has from 3.13 on
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def apart(near: torch.Tensor) -> torch.Tensor:
    """Return the same values, with FAR elements between the beginnings of rows."""
    far = lazy(len(near), FAR, dtype=near.dtype)[:, : near[0].numel()].unflatten(1, near.shape[1:])
    return far.copy_(near)


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def last_programs_alone() -> Iterator[None]:
    """Within it, of each launch the program with the largest indices is run, and no other."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    executor: Any = interpreter.GridExecutor
    old, set_index = executor.__init__, builder.set_grid_idx

    def init(self: Any, fn: Any, names: Any, grid: tuple[int, ...], *rest: Any) -> None:
        old(self, fn, names, (1,) * len(grid), *rest)
        x, y, z = (size - 1 for size in (*grid, 1, 1)[:3])
        builder.set_grid_idx = lambda *_: set_index(x, y, z)

    builder.set_grid_dim, set_dim = lambda *_: set_dim(2**31 - 1, 2**31 - 1, 2**31 - 1), builder.set_grid_dim
    executor.__init__ = init
    try:
        yield
    finally:
        executor.__init__ = old
        del builder.set_grid_idx, builder.set_grid_dim


@pytest.mark.parametrize("pages", ["plain", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "fp8"))])
def test_pages(triton_ops: Any, reference: Any, pages: str) -> None:
    """Written, and read by decodes, prompts and a shared prefix."""
    geometry = Geometry(4, 2, 32, 16, dtype=BF16, int8_cache=pages == "int8", fp8_cache=pages == "fp8")
    near = geometry.new_cache(6)
    planes = [None if plane is None else apart(plane) for plane in (near.k, near.v, near.k_scale, near.v_scale)]
    far = KVLayer(*planes)  # type: ignore[arg-type]
    lens, tables = [(0, 70), (0, 5)], [[5, 6, 4, 3, 2], [1]]
    metadata = make_metadata(geometry, lens, tables)
    q, k, v = (draw(75, heads, 32, dtype=BF16, seed=heads) for heads in (4, 2, 2))
    cos, sin = draw(100, 16, seed=1), draw(100, 16, seed=2)
    positions = torch.cat((torch.arange(70), torch.arange(5))).int()
    got = [ops.rotary_write_kv(q, k, v, positions, cos, sin, cache, metadata)
           for ops, cache in ((triton_ops, far), (reference, near))]  # fmt: skip
    torch.testing.assert_close(*got, atol=2e-2, rtol=2e-2)
    steps = [metadata, make_metadata(geometry, [(69, 1), (4, 1)], tables)]
    steps.append(replace(make_metadata(geometry, [(69, 1), (69, 1)], [tables[0]] * 2)))
    steps[-1] = replace(steps[-1], shared_prefix=torch.tensor([64, 2], dtype=torch.int32))
    from pagoda.kernels.attention.triton_attention import PagedAttention

    for step in steps:
        new = q[: int(step.query_start[-1])]
        want = reference.attention(new, near, step, 0.1)
        torch.testing.assert_close(PagedAttention(64).attention(new, far, step, 0.1), want, atol=3e-2, rtol=3e-2)


def test_moved_blocks(triton_ops: Any) -> None:
    plane = lazy(2**23, 513, dtype=torch.uint8)
    plane[2**23 - 3 :] = torch.arange(3, dtype=torch.uint8)[:, None] + 1
    blocks = triton_ops.make_device_blocks([plane])
    last = 2**23 - 1
    assert blocks.read(np.array([last, last - 1], np.int32)).unique(dim=1).tolist() == [[3], [2]]
    blocks.copy(np.array([[last, 7], [last - 2, last - 1]], np.int32))
    assert plane[[7, last - 1]].unique(dim=1).tolist() == [[3], [1]]
    blocks.write(np.array([last], np.int32), plane[7:8] + 5)
    assert plane[last].unique().tolist() == [8]


def test_logits(triton_ops: Any, reference: Any) -> None:
    near = draw(4, 999)
    far = apart(near)
    assert triton_ops.best_tokens(far)[1].tolist() == near.argmax(1).tolist()
    ones = np.ones(4, np.float32)
    params = DrawParams(ones, np.full(4, 20, np.int32), ones / 2, ones / 50, np.linspace(0.1, 0.9, 4))
    assert (
        triton_ops.sample(far, params).tolist() == reference.sample(near, params, reference.best_tokens(near)).tolist()
    )
    constraints = random_constraints(np.random.default_rng(1), 4, 999)
    for ops, logits in ((triton_ops, far), (reference, near)):
        ops.constrain(logits, constraints)
    assert torch.equal(far.nan_to_num(), near.nan_to_num())


def test_rows_and_weights(make_triton_ops: Any, reference: Any) -> None:
    """Linear layers of far rows and far output features, plain and quantised; experts far from each other."""
    ops = make_triton_ops(batch_invariant=True)
    x, weight = draw(3, 96), draw(4, 96, seed=1) / 8
    want = reference.linear(x, reference.prepare_linear(weight))
    plain = LibraryLinear(apart(weight), None, 4, 96, packed=False)
    torch.testing.assert_close(ops.linear(apart(x), plain), want, atol=1e-5, rtol=1e-5)
    codes = torch.randint(0, 16, (4, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    coded = QuantizedWeight(Q4, codes, (draw(4, 3, seed=2) / 8).half(), None, 96, 32)
    want = reference.linear(x, reference.prepare_quantized_linear(coded, F32))
    near = ops.prepare_quantized_linear(coded, F32)
    far = replace(near, codes=apart(near.codes))
    torch.testing.assert_close(ops.linear(apart(x), far), want, atol=1e-5, rtol=1e-5)

    up, down, router = draw(4, 32, 20) / 4, draw(4, 20, 16, seed=1) / 4, draw(3, 4, seed=3)
    experts = [[by.prepare_experts([by.prepare_linear(one) for one in stack]) for stack in (up, down)]
               for by in (ops, reference)]  # fmt: skip
    experts[0] = [replace(stack, codes=apart(stack.codes)) for stack in experts[0]]
    got, want = (by.moe(x[:, :20].contiguous(), *by.route(router, 2, True), *stacks)
                 for by, stacks in zip((ops, reference), experts, strict=True))  # fmt: skip
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_adapters(triton_ops: Any, reference: Any) -> None:
    slots, size = 2**21, 64
    piece = LowRankPiece(draw(32, size) / 8, draw(size, 32, seed=1) / 6)
    tables = [ops.make_low_rank_table(2, size, size, BF16) for ops in (triton_ops, reference)]
    for table in tables:
        table.fill(1, [piece])
    far = tables[0]
    far.shape = (slots, size, size)
    for name in ("a", "b", "bias", "first_rank"):
        kept = getattr(far, name)
        many = lazy(slots, *kept.shape[1:], dtype=kept.dtype)
        many[-1] = kept[1]
        setattr(far, name, many)
    x, before = draw(2, size, dtype=BF16), draw(2, size, dtype=BF16, seed=1)
    results = [before.clone() for _ in tables]
    for ops, table, y, slot in zip((triton_ops, reference), tables, results, (slots - 1, 1), strict=True):
        ops.add_low_rank(y, x, torch.full((2,), slot, dtype=torch.int32), table)
    torch.testing.assert_close(*results, atol=3e-2, rtol=3e-2)


def test_as_many_rows(triton_ops: Any, reference: Any) -> None:
    """The last of so many contiguous rows that they have more than 2^31 elements, one for each program."""
    rows, size = 2**21 + 3, 1024
    x, weight = lazy(rows, size, dtype=BF16), draw(size, dtype=BF16)
    x[-1] = draw(size, dtype=BF16, seed=1)
    last = x[-1:].clone()
    with last_programs_alone():
        norm, gated = triton_ops.rms_norm(x, weight, 1e-6), triton_ops.gate(x, Activation.SILU)
        plain = triton_ops.activate(x, Activation.GELU)
        summed, _ = triton_ops.add_rms_norm(x, x, weight, 1e-6)
    for got, want in (
        (norm, reference.rms_norm(last, weight, 1e-6)),
        (gated, reference.gate(last, Activation.SILU)),
        (plain, reference.activate(last, Activation.GELU)),
        (summed, reference.add_rms_norm(last, last, weight, 1e-6)[0]),
    ):
        torch.testing.assert_close(got[-1:], want, atol=2e-2, rtol=2e-2)
