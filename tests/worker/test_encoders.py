"""Encoder runs: outputs by content, whichever items are computed together, and where they go."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import MediaItem, Request, without_features
from pagoda.core.scheduler_output import EncoderRun, SchedulerOutput
from pagoda.engine.wire import Codec
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.linear import Linear
from pagoda.layers.module import parameters
from pagoda.models.base import FEATURES, Encoder, EncoderItem, ItemArray, check_finite, check_media
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.encoders import EncoderOutputs
from pagoda.worker.forward_runner import Programs, make_forward
from tests.worker.hand_made import row_init, step

WIDTH, HIDDEN = 20, 32


class PatchEncoder(Encoder):
    """Patches attend to each other; every other one is returned."""

    output_size = HIDDEN

    def __init__(self) -> None:
        self.patches = Linear(WIDTH, HIDDEN)
        self.attention = Attention(HIDDEN, Heads(2, 2, 16), None, causal=False, out=None)

    def largest_item(self) -> MediaItem:
        return MediaItem("", 0, 20, np.zeros((40, WIDTH), np.float32))

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        if len(shape) != 2 or shape[1] != WIDTH:
            raise RequestError(f"an image has patches of {WIDTH} numbers, not {tuple(shape)}", "media")
        return shape[0] // 2

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        every_other = np.arange(1, len(features), 2, dtype=np.int64)
        inputs = {
            FEATURES: ItemArray(features),
            "every_other": ItemArray(every_other, Domain.OUTPUTS, indexes=Domain.TOKENS),
        }
        return EncoderItem((np.array([len(features)], np.int32),), len(every_other), inputs)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x = self.patches(ops, batch.inputs[FEATURES].tensor)
        attended, x = self.attention(ops, x, x, batch, kv, last=False)
        return ops.select_rows(ops.add(attended, x), batch.inputs["every_other"].tensor)


def make_outputs(ops: Ops, crosses: bool = False) -> EncoderOutputs:
    encoder = PatchEncoder()
    generator = torch.Generator().manual_seed(3)
    for _, parameter in parameters(encoder):
        rows, columns = parameter.shard.shape
        parameter.fill(ops.prepare_linear(torch.randn(rows, columns, generator=generator) / 4))
    return EncoderOutputs(make_forward(encoder, ops, CpuDevice(), 4, 64, 1), torch.float32, crosses)


def image(name: str, offset: int, length: int) -> MediaItem:
    seed = int.from_bytes(name.encode(), "little")
    features = np.random.default_rng(seed).normal(size=(2 * length, WIDTH)).astype(np.float32)
    return MediaItem(name, offset, length, features)


def run(outputs: EncoderOutputs, output: SchedulerOutput) -> None:
    outputs.apply(output)
    outputs.run(output)


@pytest.fixture
def outputs() -> EncoderOutputs:
    return make_outputs(CpuDevice().make_ops("native", 64, False))


def test_items_have_the_same_bits_whatever_is_computed_with_them(outputs: EncoderOutputs) -> None:
    items = [image("a", 0, 7), image("bb", 0, 1), image("ccc", 0, 20), image("a", 0, 7)]
    together = outputs.compute(items)
    expected = make_outputs(ReferenceOps()).compute(items)  # type: ignore[arg-type]
    for item, got, wanted in zip(items, together, expected, strict=True):
        assert got.shape == (item.length, HIDDEN)
        assert torch.equal(outputs.compute([item])[0], got)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    recorder = outputs._forward.recorder
    assert isinstance(recorder, Programs)
    assert all(program is not None for program in recorder._programs.values()), "the encoder is not recorded"


def test_outputs_take_the_place_of_the_tokens_of_a_chunk(outputs: EncoderOutputs) -> None:
    items = (image("a", 2, 5), image("b", 7, 4))
    a, b = outputs.compute(items)
    admitted = replace(row_init(3, [0] * 12, [1]), media=tuple(map(without_features, items)))
    runs = (EncoderRun(3, 0, "a"), EncoderRun(3, 1, "b"))
    first = step(1, [(1, 5, 2), (3, 0, 4)], admitted=(admitted,), encoder_runs=runs, encoder_inputs=items)
    run(outputs, first)
    embeds = outputs.embeds(first)
    assert embeds is not None
    assert embeds.index.tolist() == [4, 5]
    assert torch.equal(embeds.values, a[:2])
    second = step(2, [(3, 4, 5)])
    run(outputs, second)
    embeds = outputs.embeds(second)
    assert embeds is not None
    assert embeds.index.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(embeds.values, torch.cat([a[2:], b[:2]]))
    last = step(3, [(3, 9, 3)])
    assert outputs.embeds(last) is not None
    assert outputs.embeds(step(4, [(3, 12, 1)])) is None
    assert not outputs._items


def test_an_output_is_computed_once_until_it_is_freed(outputs: EncoderOutputs) -> None:
    a = image("a", 1, 5)
    for row in range(3):
        admitted = replace(row_init(row, [0] * 9, [1]), media=(without_features(a),))
        freed = ("a",) if row == 2 else ()
        given = (a,) if row != 1 else ()
        now = step(row + 1, [(row, 0, 9)], admitted=(admitted,), encoder_inputs=given, encoder_freed=freed)
        run(outputs, now)
        assert outputs.embeds(now) is not None
        assert outputs.num_computed == (1, 1, 2)[row]
    outputs.apply(step(4, [], encoder_freed=("a",)))
    assert not outputs._outputs


def test_a_step_in_flight_after_an_encoder_run_that_failed_computes_the_other_rows(outputs: EncoderOutputs) -> None:
    """The scheduler computes again what read the output; the step must not fail for those that did not."""
    a = image("a", 1, 5)
    admitted = replace(row_init(0, [0] * 9, [1]), media=(without_features(a),))
    failed = step(1, [(0, 0, 3)], admitted=(admitted,), encoder_runs=(EncoderRun(0, 0, "a"),), encoder_inputs=(a,))
    outputs.apply(failed)  # and then the run ran out of memory
    after = step(2, [(0, 3, 6), (1, 4, 1)])
    outputs.apply(after)
    embeds = outputs.embeds(after)
    assert embeds is not None
    assert (embeds.index.tolist(), embeds.values.any().item()) == ([0, 1, 2], False)


def test_a_step_in_flight_that_shares_the_output_of_a_run_that_failed_fills_its_cross_attention_with_zeros() -> None:
    outputs = make_outputs(CpuDevice().make_ops("native", 64, False), crosses=True)
    a = image("a", 0, 6)
    admitted = replace(row_init(1, [0] * 3, [1]), media=(without_features(a),), encoder_len=6)
    outputs.apply(step(1, [(0, 0, 3)], encoder_inputs=(a,)))  # and then the run ran out of memory
    after = step(2, [(1, 0, 3)], admitted=(admitted,), encoder_runs=(EncoderRun(1, 0, "a"),))
    run(outputs, after)
    states = outputs.states(after)
    assert states is not None
    assert (states.positions.tolist(), states.values.any().item()) == ([0, 1, 2, 3, 4, 5], False)


def test_an_output_that_is_missing_for_another_reason_fails_the_step(outputs: EncoderOutputs) -> None:
    """Tokens computed from zeros would be sent: no step that raised has them computed again."""
    a = image("a", 1, 5)
    init = replace(row_init(0, [0] * 9, [1]), media=(without_features(a),))
    outputs.apply(step(1, [(0, 0, 3)], admitted=(init,), encoder_inputs=(a,)))  # raised
    outputs.apply(step(2, [], encoder_freed=("a",)))
    with pytest.raises(RuntimeError, match="'a' was not computed"):
        outputs.embeds(step(3, [(0, 3, 6)]))


def test_states_of_encoder_decoder_rows_enter_the_cache_though_the_output_is_kept() -> None:
    outputs = make_outputs(CpuDevice().make_ops("native", 64, False), crosses=True)
    a = image("a", 0, 6)
    for row in range(2):
        admitted = replace(row_init(row, [0] * 3, [1]), media=(without_features(a),), encoder_len=6)
        runs = (EncoderRun(row, 0, "a"),)
        given = (a,) if row == 0 else ()
        now = step(row + 1, [(row, 0, 3)], admitted=(admitted,), encoder_runs=runs, encoder_inputs=given)
        run(outputs, now)
        assert outputs.embeds(now) is None
        states = outputs.states(now)
        assert states is not None
        assert (states.rows.tolist(), states.positions.tolist()) == ([row] * 6, list(range(6)))
        assert torch.equal(states.values, outputs._outputs["a"])
    assert outputs.num_computed == 1


def test_features_travel_with_the_request() -> None:
    item = replace(image("a", 1, 3), grid=(2, 3))
    tokens = np.arange(5, dtype=np.int32)
    request = Request("r", tokens, SamplingParams(), media=(item,))
    codec = Codec(Request)
    got = codec.decode(codec.encode(request)).media[0]  # type: ignore[arg-type]
    assert (got.content_hash, got.offset, got.length, got.grid) == ("a", 1, 3, (2, 3))
    assert got.features.tobytes() == image("a", 1, 3).features.tobytes()  # type: ignore[union-attr]


def test_items_that_the_encoder_cannot_read_are_refused() -> None:
    encoder, item = PatchEncoder(), image("a", 1, 3)
    request = Request("r", np.arange(5, dtype=np.int32), SamplingParams(), media=(item,))
    check_media(request, encoder, crosses=False)
    for media, said in (
        ((replace(item, length=4),), "has 4 tokens, but its features give 3"),
        ((replace(item, features=None),), "needs features"),
        ((replace(item, features=np.zeros((6, 5), np.float32)),), "patches of 20 numbers"),
        ((item, item), "within another"),
        ((replace(item, offset=3),), "outside of the prompt"),
    ):
        with pytest.raises(RequestError, match=said):
            check_media(replace(request, media=media), encoder, crosses=False)
    with pytest.raises(RequestError, match="neither images nor audio"):
        check_media(request, None, crosses=False)
    with pytest.raises(RequestError, match="needs an encoder input"):
        check_media(replace(request, media=()), encoder, crosses=True)
    with pytest.raises(RequestError, match="encoder_len=0"):
        check_media(request, encoder, crosses=True)
    with pytest.raises(RequestError, match="one encoder input per request, not 2"):
        check_media(replace(request, media=(item, item), encoder_len=6), encoder, crosses=True)
    check_media(replace(request, encoder_len=3), encoder, crosses=True)


def test_numbers_that_are_not_finite_are_refused() -> None:
    features = np.zeros((6, WIDTH), np.float32)
    check_finite([MediaItem("a", 0, 3, features)])
    features[5, 3] = np.nan
    with pytest.raises(RequestError, match="finite"):
        check_finite([MediaItem("a", 0, 3, features)])
