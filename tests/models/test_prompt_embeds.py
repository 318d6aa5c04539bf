"""Prompts given as embeddings: those of tokens give the bits of the tokens; others give what transformers gives."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda.kernels.batch import ForwardBatch, Input, KVLayer
from pagoda.kernels.native_ops import NativeOps
from pagoda.layers.linear import EMBED_ROWS, EMBEDS
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import identify
from pagoda.models.llama import Llama
from pagoda.ops.declare import Domain
from pagoda.worker.forward_runner import Computed, ForwardRunner, Programs
from tests.device_under_test import DeviceUnderTest
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import CONFIGS, VOCAB, make_model, save

TAKE_EMBEDS = [name for name in CONFIGS if name != "gemma4-shared"]
"""Its layers look up the tokens that embeddings replace, so they are refused (test_refused_settings.py)."""


class WithEmbeds:
    """A ForwardRunner for PagedRunner, in whose batches `given` decides which tokens are embeddings, and which ones."""

    def __init__(self, forward: ForwardRunner, given: Callable[[ForwardBatch], tuple[torch.Tensor, torch.Tensor]]):
        """given: returns the indices of tokens, int64 [n], and their embeddings, [n, hidden]."""
        self._forward, self._given = forward, given
        self.model = forward.model

    def run(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Computed:
        index, values = self._given(batch)
        inputs = {EMBEDS: Input(values, Domain.EMBEDS), EMBED_ROWS: Input(index, Domain.EMBEDS)}
        token_ids = batch.token_ids.clone()
        token_ids[index] = 0
        return self._forward.run(replace(batch, token_ids=token_ids, inputs=inputs), kv)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save(make_model(name), tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", TAKE_EMBEDS)
@torch.inference_mode()
def test_embeddings_of_tokens_have_the_bits_of_the_tokens(
    name: str, folders: Callable[[str], Path], on: DeviceUnderTest
) -> None:
    """On a CPU with native kernels, recorded. Rows of tokens, of embeddings and of both in one batch, in chunks and
    decoding.
    """
    on.must_compute(name)
    is_cpu = on.device.type == "cpu"
    ops = on.ops("native" if is_cpu else "auto", threads=2)
    model = load_model(identify(folders(name)), ops, torch.bfloat16, on.device)
    assert isinstance(model, Llama)
    recorders = [Programs(ops) if isinstance(ops, NativeOps) else None for _ in range(2)]
    plain, other = (ForwardRunner(model, ops, recorder=recorder) for recorder in recorders)
    generator = torch.Generator().manual_seed(1)

    def given(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        index = (torch.rand(len(batch.token_ids), generator=generator) < 0.7).nonzero().squeeze(1).to(on.device)
        values = model.model.embed_tokens(ops, batch.token_ids[index])
        assert isinstance(values, torch.Tensor)
        return index, values

    rng = np.random.default_rng(3)
    tokens = [rng.integers(3, VOCAB, 24).tolist() for _ in range(4)]
    steps = [[(0, 0, 5), (1, 0, 17)], [(0, 5, 1), (1, 17, 7), (2, 0, 24), (3, 0, 1)], [(0, 6, 18), (3, 1, 1)]]
    logits: list[list[torch.Tensor]] = []
    for forward in (plain, WithEmbeds(other, given)):
        runner = PagedRunner(forward, 4, 24, torch.bfloat16, 8, on.device)  # type: ignore[arg-type]
        logits.append([runner.logits([(row, at, tokens[row][at : at + n]) for row, at, n in work]) for work in steps])
    for of_tokens, of_embeddings in zip(*logits, strict=True):
        assert torch.equal(of_tokens, of_embeddings)
    if recorders[0] is not None:
        assert None not in recorders[0]._programs.values(), "the forward is not recorded"


@pytest.mark.parametrize(
    ("kernels", "block_size", "name"),
    [
        # The other kernels take embeddings in the same way whatever the model: quickly, for some.
        pytest.param(*kernels, name, marks=[] if kernels[0] == "native" or i % 8 == 0 else pytest.mark.slow)
        for kernels in (("torch", 4), ("native", 8), ("reference", 4))
        for i, name in enumerate(TAKE_EMBEDS)
        if name != "gemma3-multimodal"
    ],
)
@torch.inference_mode()
def test_any_embeddings_give_what_transformers_gives(
    name: str, kernels: str, block_size: int, folders: Callable[[str], Path], on: DeviceUnderTest
) -> None:
    """`inputs_embeds` is after the model's own embedding: Gemma's factor is not applied to it."""
    if kernels != "reference":
        on.must_compute(name)
    theirs = make_model(name)
    hidden = theirs.config.get_text_config().hidden_size
    embeds = torch.randn(23, hidden, generator=torch.Generator().manual_seed(5)) * 2
    expected = theirs(inputs_embeds=embeds[None]).logits[0, -1]
    ops, given = on.ops(kernels), embeds.to(on.device)
    forward = ForwardRunner(load_model(identify(folders(name)), ops, torch.float32, on.device), ops)

    def all_given(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(len(batch.token_ids), device=on.device), given[batch.positions.long()]

    runner = PagedRunner(WithEmbeds(forward, all_given), 1, 24, torch.float32, block_size, on.device)  # type: ignore[arg-type]
    ours = [runner.logits([(0, at, [0] * (end - at))]) for at, end in ((0, 9), (9, 22), (22, 23))]
    torch.testing.assert_close(ours[-1][0], expected, rtol=1e-4, atol=1e-4)
