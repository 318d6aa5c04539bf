"""The attention layer without a rotary embedding: over a cache, chunk by chunk, and of a whole text."""

from typing import Any

import pytest
import torch

from pagoda.kernels.batch import ForwardBatch, OutputRows
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.layers.attention import Attention, Heads
from tests.kernels.paged import Geometry, make_metadata

HIDDEN, LENGTH = 24, 11
GEOMETRY = Geometry(4, 2, 8, 4)
OPS: Any = ReferenceOps()


def layer(causal: bool) -> Attention:
    made = Attention(HIDDEN, Heads(4, 2, 8), None, causal, out="out_proj")
    assert made.o_proj is not None
    for seed, (linear, shape) in enumerate(((made.qkv, (64, HIDDEN)), (made.o_proj, (HIDDEN, 32)))):
        linear.weight.fill(OPS.prepare_linear(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 5))
    return made


def expected(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    q, k, v = OPS.split_qkv(attention.qkv(OPS, x), 4, 2, 8)
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=attention.kv is not None, enable_gqa=True
    )
    assert attention.o_proj is not None
    return attention.o_proj(OPS, attended[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize(("causal", "chunks"), [(True, [LENGTH]), (True, [5, 4, 1, 1]), (False, [LENGTH])])
def test_values(causal: bool, chunks: list[int]) -> None:
    attention, x = layer(causal), torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(9))
    kv = [GEOMETRY.new_cache(3)] if causal else []
    found: list[torch.Tensor] = []
    for begin, size in zip([sum(chunks[:at]) for at in range(len(chunks))], chunks, strict=True):
        metadata = make_metadata(GEOMETRY, [(begin, size)], [[1, 2, 3]])
        index = torch.arange(size)
        batch = ForwardBatch(index.int(), index.int(), (metadata,), OutputRows(index, (metadata,)), index)
        rows = x[begin : begin + size]
        attended, residual = attention(OPS, rows, rows, batch, kv, last=True)
        assert torch.equal(residual, rows)
        found.append(attended)
    torch.testing.assert_close(torch.cat(found), expected(attention, x))
