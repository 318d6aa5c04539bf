"""Layers with two attentions, KV groups of different shapes: results do not depend on chunks, windows or sharing."""

from collections.abc import Sequence

import pytest
import torch

from pagoda.base.model_spec import ModelSpec
from pagoda.core.kv import KVGroupKind, KVShape
from pagoda.kernels.batch import KVLayer
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.kv import place_kv
from pagoda.layers.linear import Embedding
from pagoda.layers.module import Module, parameters
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Matrix, RotaryTable, Table
from pagoda.layers.rope_config import RopeConfig
from pagoda.layers.rotary import Rotary
from pagoda.loading.rotary_tables import build_rotary_tables
from pagoda.models.base import Model
from pagoda.ops.batch import ForwardBatch
from pagoda.ops.batch import KVLayer as AnyKVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import ON_CPU, DeviceUnderTest
from tests.models.paged_runner import PagedRunner

HIDDEN, VOCAB = 48, 50
SPEC = ModelSpec("two", VOCAB, HIDDEN, 1, 2, 4, 2, 16, 64, (0, 0))


class TwoAttentions(Module):
    """One attends to everything with two KV heads of 16, the other to a window of 5 with one KV head of 48."""

    def __init__(self) -> None:
        self.norm = RMSNorm(HIDDEN, 1e-5)
        self.wide = Attention(HIDDEN, Heads(4, 2, 16), Rotary(RopeConfig(), 16))
        self.near = Attention(HIDDEN, Heads(2, 1, 48), Rotary(RopeConfig(theta=300.0), 48), window=5)

    def __call__(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch, kv: Sequence[AnyKVLayer], last: bool) -> Tensor:
        normed = self.norm(ops, x)
        far, residual = self.wide(ops, normed, x, batch, kv, last)
        near, _ = self.near(ops, normed, x, batch, kv, last)
        return ops.add(ops.add(far, near), residual)


class Two(Model):
    generates = False

    def __init__(self) -> None:
        self.spec = SPEC
        self.embedding = Embedding(VOCAB, HIDDEN)
        self.layers = [TwoAttentions(), TwoAttentions()]
        self.norm = RMSNorm(HIDDEN, 1e-5)
        self.kv_groups = place_kv(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[AnyKVLayer]) -> Tensor:
        x = self.embedding(ops, batch.token_ids)
        for layer in self.layers:
            x = layer(ops, x, batch, kv, last=layer is self.layers[-1])
        return self.norm(ops, x)


def made(kernels: str, on: DeviceUnderTest = ON_CPU) -> ForwardRunner:
    """A model with random weights."""
    generator = torch.Generator().manual_seed(1)
    model, ops = Two(), on.ops(kernels)
    for _, parameter in parameters(model):
        match parameter.declared:
            case Matrix() as matrix:
                weight = torch.randn(matrix.rows, matrix.columns, generator=generator) * matrix.columns**-0.5
                parameter.fill(ops.prepare_linear(weight.to(on.device)))
            case RotaryTable(rope, head_dim):
                parameter.fill(build_rotary_tables(rope, head_dim, 64, on.device))
            case Table(rows, columns):
                parameter.fill(torch.randn(rows, columns, generator=generator).to(on.device))
            case vector:
                weight = 1 + torch.randn(vector.size, generator=generator) * 0.2
                parameter.fill(weight.to(on.device))
    return ForwardRunner(model, ops)


def test_groups_are_distinguished_by_shape() -> None:
    groups = Two().kv_groups
    assert [(group.kind, group.window, group.layers, group.shape) for group in groups] == [
        (KVGroupKind.FULL, 0, (0, 2), KVShape(2, 16, 16)),
        (KVGroupKind.WINDOW, 5, (1, 3), KVShape(1, 48, 48)),
    ]


TOKENS = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(2)).tolist()


def alone(layer: KVLayer) -> KVLayer:
    """A copy in memory of its own, without gaps between blocks."""
    planes = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    copies = [None if plane is None else plane.clone(memory_format=torch.contiguous_format) for plane in planes]
    return KVLayer(*copies)


def in_chunks(
    run: ForwardRunner, kv_dtype: torch.dtype, separate: bool = False, on: DeviceUnderTest = ON_CPU
) -> torch.Tensor:
    """The hidden states of TOKENS in row 0, in chunks and among other rows; separate: no layers share memory."""
    tokens = TOKENS
    runner = PagedRunner(run, 3, 40, kv_dtype, block_size=8, device=on.device)
    assert not all(layer.k.is_contiguous() for layer in runner.kv)
    if separate:
        runner.kv = [alone(layer) for layer in runner.kv]
    parts = [runner.hidden([(1, 0, tokens[5:7]), (0, 0, tokens[:9])], [0, 9])]
    parts.append(runner.hidden([(0, 9, tokens[9:20]), (2, 0, tokens)], [11, 0]))
    parts += [runner.hidden([(0, at, tokens[at : at + 1]), (1, at - 18, [at])], [1, 0]) for at in range(20, 23)]
    return torch.cat(parts)


@pytest.mark.parametrize("kernels", ["reference", "torch", "native"])
@torch.inference_mode()
def test_chunks_among_other_rows_give_what_the_whole_prompt_gives(kernels: str, on: DeviceUnderTest) -> None:
    run = made(kernels, on)
    whole = PagedRunner(run, 1, 40, torch.float32, 8, on.device).hidden([(0, 0, TOKENS)], [23])
    torch.testing.assert_close(in_chunks(run, torch.float32, on=on), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
@torch.inference_mode()
def test_native_kernels_on_shared_memory_give_the_bits_of_separate_memory(kv_dtype: torch.dtype) -> None:
    run = made("native")
    assert torch.equal(in_chunks(run, kv_dtype), in_chunks(run, kv_dtype, separate=True))
