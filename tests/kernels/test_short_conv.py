"""Short convolutions: against torch's own, and the same bits in every chunking, batch and number of threads."""

from collections.abc import Iterator

import pytest
import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from tests.kernels.paged import Geometry, make_metadata

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZE = 8  # tokens per block


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_states(num_blocks: int, num_taps: int, dim: int, dtype: torch.dtype) -> KVLayer:
    """States full of what no row may read; of the null block, NaN."""
    k = torch.full((num_blocks + 1, num_taps - 1, 1, dim), 9.0, dtype=dtype)
    k[0] = torch.nan
    return KVLayer(k, k[..., :0])


def metadata(lens: list[tuple[int, int]], tables: list[list[int]]) -> AttentionMetadata:
    """As the scheduler leaves the tables: entries before the state that is read are null."""
    passed = [max(0, computed - 1) // SIZE for computed, _ in lens]
    made = make_metadata(Geometry(block_size=SIZE), lens, tables)
    for row, count in enumerate(passed):
        made.block_table[row, :count] = 0
    return made


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch's convolution of one row from its first token on."""
    taps, dim = weight.shape
    kernel, offset = weight.T.unsqueeze(1).float(), None if bias is None else bias.float()
    padded = torch.nn.functional.pad(x.T.float(), (taps - 1, 0))
    return torch.nn.functional.conv1d(padded.unsqueeze(0), kernel, offset, groups=dim)[0].T.to(x.dtype)


def chunks(length: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(computed, new) of chunks of these sizes, over and over."""
    at = number = 0
    while at < length:
        new = min(sizes[number % len(sizes)], length - at)
        yield at, new
        at, number = at + new, number + 1


@DTYPES
@pytest.mark.parametrize(("taps", "dim", "has_bias"), [(3, 96, False), (4, 37, True), (2, 1031, True)])
def test_rows_in_chunks_equal_the_whole(fast: Ops, taps: int, dim: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Two rows next to each other; each chunk goes on from the state that the one before left."""
    lengths, weight = (29, 17), draw(taps, dim, dtype=dtype, seed=1)
    bias = draw(dim, dtype=dtype, seed=2) if has_bias else None
    rows = [draw(length, dim, dtype=dtype, seed=length) for length in lengths]
    tables = [[3, 1, 6, 8], [2, 7, 5, 4]]
    found: list[torch.Tensor] = []
    for sizes in ([64], [1], [5, 1, 11], [8]):
        states, got = new_states(8, taps, dim, dtype), [[torch.empty(0, dim, dtype=dtype)] for _ in rows]
        steps = [list(chunks(length, sizes)) for length in lengths]
        for step in range(max(map(len, steps))):
            live = [row for row in (1, 0) if step < len(steps[row])]
            lens = [steps[row][step] for row in live]
            x = torch.cat([rows[row][at : at + new] for row, (at, new) in zip(live, lens, strict=True)]).unsqueeze(1)
            out = fast.short_conv(x, weight, bias, states, metadata(lens, [tables[row] for row in live]))
            for row, part in zip(live, out.split([new for _, new in lens]), strict=True):
                got[row].append(part)
        found.append(torch.cat([torch.cat(parts) for parts in got]))
    for other in found:
        assert torch.equal(other, found[0])
    want = torch.cat([expected(row, weight, bias) for row in rows])
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(found[0], want, atol=tolerance, rtol=tolerance)


@DTYPES
def test_a_row_goes_on_from_a_state_of_the_same_step(fast: Ops, dtype: torch.dtype) -> None:
    """As a prefix hit may: the second row begins after a block that the first one fills in this step."""
    whole, weight = draw(20, 40, dtype=dtype), draw(3, 40, dtype=dtype, seed=1)
    states = new_states(5, 3, 40, dtype)
    x = torch.cat([whole[:18], whole[16:]]).unsqueeze(1)
    out = fast.short_conv(x, weight, None, states, metadata([(0, 18), (16, 4)], [[1, 2, 3], [1, 2, 4]]))
    assert torch.equal(out[18:20], out[16:18])
    again = fast.short_conv(whole.unsqueeze(1), weight, None, states, metadata([(0, 20)], [[1, 2, 3]]))
    assert torch.equal(again[16:], out[18:])


@DTYPES
def test_only_its_own_blocks_are_written(fast: Ops, dtype: torch.dtype) -> None:
    states = new_states(4, 3, 16, dtype)
    fast.short_conv(draw(3, 1, 16, dtype=dtype), draw(3, 16, dtype=dtype), None, states, metadata([(0, 3)], [[2]]))
    assert (states.k[[1, 3, 4]] == 9).all()
    assert states.k[0].isnan().all()
    out = fast.short_conv(
        draw(2, 1, 16, dtype=dtype), draw(3, 16, dtype=dtype), None, states, metadata([(9, 2)], [[0, 0]])
    )  # a dry run: the null block is zeros
    assert out.isfinite().all()
    assert states.k[0].isnan().all()


@DTYPES
def test_bits_do_not_depend_on_threads_or_neighbours(native: NativeOps, dtype: torch.dtype) -> None:
    x, weight = draw(700, 1, 1088, dtype=dtype), draw(3, 1088, dtype=dtype, seed=1)
    lens, tables = [(0, 1), (0, 600), (0, 99)], [[1], list(range(2, 77)), list(range(77, 90))]
    whole = [
        NativeOps(native.library, threads).short_conv(
            x, weight, None, new_states(90, 3, 1088, dtype), metadata(lens, tables)
        )
        for threads in (1, 3)
    ]
    assert torch.equal(*whole)
    alone = native.short_conv(x[601:], weight, None, new_states(90, 3, 1088, dtype), metadata(lens[2:], tables[2:]))
    assert torch.equal(whole[0][601:], alone)


@DTYPES
def test_silu_of_the_sum(fast: Ops, dtype: torch.dtype) -> None:
    """The sum is not rounded before."""
    x, weight, bias = draw(20, 1, 37, dtype=dtype), draw(4, 37, dtype=dtype, seed=1), draw(37, dtype=dtype, seed=2)
    at = metadata([(0, 20)], [[1, 2, 3]])
    out = fast.short_conv(x, weight, bias, new_states(3, 4, 37, dtype), at, silu=True)
    want = torch.nn.functional.silu(expected(x[:, 0].float(), weight.float(), bias.float())).to(dtype)
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)


def test_what_does_not_fit_is_refused(native: NativeOps) -> None:
    x, at = torch.zeros(2, 1, 32), metadata([(0, 2)], [[1]])
    for weight, states in (
        (torch.zeros(3, 16), new_states(1, 3, 32, torch.float32)),
        (torch.zeros(3, 32), new_states(1, 4, 32, torch.float32)),
        (torch.zeros(3, 32), new_states(1, 3, 32, torch.bfloat16)),
    ):
        with pytest.raises(ValueError, match=r"short_conv|fit"):
            native.short_conv(x, weight, None, states, at)
