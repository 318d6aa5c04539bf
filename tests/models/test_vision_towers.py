"""The towers of models that see, as tiny random checkpoints, compute what transformers computes."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Idefics3VisionConfig, PreTrainedModel
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from pagoda.base.errors import RequestError
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.kernels.native_ops import NativeOps
from pagoda.layers.module import parameters, walk
from pagoda.layers.parameter import Matrix, Table
from pagoda.loading.adapters.files import AdapterTargets
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture, read_model
from pagoda.loading.model_files import identify
from pagoda.loading.weight_memory import PreparedAs, SharesInMemory
from pagoda.models.base import FEATURES, Encoder
from pagoda.worker.encoders import make_encoder_batch
from pagoda.worker.forward_runner import ForwardRunner, Programs
from pagoda.worker.memory import encoder_memory
from tests.device_under_test import ON_CPU, DeviceUnderTest
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import VOCAB
from tests.models.tiny_vision import (
    CONFIGS,
    IMAGE,
    QWEN,
    make_vision,
    picture,
    picture_inputs,
    save_vision,
    tokens_of_picture,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def reference(name: str) -> PreTrainedModel:
    return make_vision(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """name -> checkpoint folder, made when first asked for."""

    @cache
    def folder(name: str) -> Path:
        return save_vision(reference(name), tmp_path_factory.mktemp(name))

    return folder


def load(folder: Path, on: DeviceUnderTest, kernels: str, threads: int = 1, dtype=torch.float32) -> ForwardRunner:
    ops = on.ops(kernels, threads)
    encoder = load_model(identify(folder), ops, dtype, on.device).media_encoder
    assert isinstance(encoder, Encoder)
    return ForwardRunner(encoder, ops, recorder=Programs(ops) if isinstance(ops, NativeOps) else None)


def encoded(runner: ForwardRunner, name: str, numbers, on: DeviceUnderTest, dtype=torch.float32) -> list[torch.Tensor]:
    """What the tower makes of some pictures, in one batch."""
    encoder = runner.model
    assert isinstance(encoder, Encoder)
    given = [picture(name, number) for number in numbers]
    counts = [encoder.num_outputs(features.shape, grid) for features, grid in given]
    assert counts == [len(tokens_of_picture(name, number)) for number in numbers]
    items = [encoder.item(features, grid) for features, grid in given]
    return list(runner.run(make_encoder_batch(items, dtype, on.device), ()).hidden.cpu().split(counts))


@torch.inference_mode()
def expected(name: str, number: int) -> torch.Tensor:
    given = picture_inputs(name, [number])
    made = reference(name).model.get_image_features(**given)
    deep = getattr(made, "deepstack_features", None) or ()
    return torch.cat([made.pooler_output[0], *(of_layer[0] for of_layer in deep)], dim=1)


@pytest.mark.parametrize("kernels", ["torch", "native", "reference"])
@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_equal(name: str, kernels: str, folders, on: DeviceUnderTest):
    ours = encoded(load(folders(name), on, kernels), name, (0, 1), on)
    tolerance = 1e-4
    for number, rows in enumerate(ours):
        rows = rows[torch.tensor(tokens_of_picture(name, number)) == IMAGE]
        torch.testing.assert_close(rows, expected(name, number), atol=tolerance, rtol=tolerance)
    assert not torch.allclose(ours[0][0], ours[1][0], atol=0.1)


@torch.inference_mode()
def test_the_experts_of_qwen3_vl_are_stored_transposed(folders, on: DeviceUnderTest):
    ids, ops = torch.randint(8, VOCAB, (23,)).tolist(), on.ops("torch")
    runner = ForwardRunner(load_model(identify(folders("qwen3-vl-moe")), ops, torch.float32, on.device), ops)
    got = PagedRunner(runner, 1, 40, torch.float32, device=on.device).logits([(0, 0, ids)])[0]
    want = reference("qwen3-vl-moe")(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits_in_any_batch(name: str, folders):
    alone = load(folders(name), ON_CPU, "native")
    plain = ForwardRunner(alone.model, alone.ops)
    want = [encoded(plain, name, (number,), ON_CPU)[0] for number in range(3)]
    for threads in (1, 2):
        runner = load(folders(name), ON_CPU, "native", threads)
        for order in ((0, 1, 2), (2, 0), (1,), (1, 1)):
            for number, rows in zip(order, encoded(runner, name, order, ON_CPU), strict=True):
                assert torch.equal(rows, want[number])
        assert isinstance(runner.recorder, Programs)
        assert len(runner.recorder._programs) == 1
        assert None not in runner.recorder._programs.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_memory_plan_has_what_a_run_takes(name: str, dtype: torch.dtype, folders):
    runner = load(folders(name), ON_CPU, "native", dtype=dtype)
    encoder, numbers = runner.model, [0, 1, 2] * 8
    assert isinstance(encoder, Encoder)
    items = [encoder.item(*picture(name, number)) for number in numbers]
    batch = make_encoder_batch(items, dtype, ON_CPU.device)
    runner.run(batch, ())
    assert isinstance(runner.recorder, Programs)
    ((_, program),) = runner.recorder._programs.items()
    assert program is not None
    copied = sum(picture(name, number)[0].nbytes for number in numbers)  # joined, and in the compute type
    taken = program._scratch.numel() + copied + batch.inputs[FEATURES].tensor.nbytes
    num_outputs = sum(item.num_outputs for item in items)
    num_read = sum(tokens_of_picture(name, number).count(IMAGE) for number in numbers)
    assert num_read * encoder.tokens_per_output == sum(item.num_tokens for item in items)
    kind = "float32" if dtype is torch.float32 else "bfloat16"
    planned = encoder_memory(encoder, kind, num_outputs, SchedulerOptions(encoder_budget=1)).scratch
    assert taken <= planned <= 2 * taken


@pytest.mark.parametrize("side", [26, 27, 32, 70])
def test_patches_of_full_tiles_are_at_their_own_places_in_transformers_too(side: int):
    """Of the sizes that checkpoints have: its rounding moves some of other sizes, which ones depends on the CPU."""
    tower = Idefics3VisionConfig(image_size=side, patch_size=1, hidden_size=1, num_channels=1)
    embeddings = Idefics3VisionEmbeddings(tower)
    embeddings.position_embedding.weight = torch.nn.Parameter(torch.arange(1.0 * side * side)[:, None])
    for parameter in embeddings.patch_embedding.parameters():
        torch.nn.init.zeros_(parameter)
    got = embeddings(torch.zeros(1, 1, side, side), torch.ones(1, side, side, dtype=torch.bool))
    assert torch.equal(got[0, :, 0], torch.arange(1.0 * side * side))


@pytest.mark.parametrize("name", CONFIGS)
def test_items_that_do_not_fit_are_refused(name: str, folders):
    encoder = load(folders(name), ON_CPU, "torch").model
    assert isinstance(encoder, Encoder)
    largest = encoder.largest_item()
    assert largest.features is not None
    assert encoder.item(largest.features, largest.grid).num_outputs == largest.length
    rows, values = largest.features.shape
    for shape, grid in (((rows - 1, values), largest.grid), ((rows, values + 1), largest.grid), ((rows, values), (1,))):
        with pytest.raises(RequestError, match="not "):
            encoder.num_outputs(shape, grid)
    assert np.isfinite(largest.features).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tower_is_neither_quantised_nor_adapted(name: str, folders):
    files = identify(folders(name))
    plain = encoded(load(folders(name), ON_CPU, "native"), name, [0], ON_CPU)
    ops = ON_CPU.ops("native")
    quantised = load_model(files, ops, torch.float32, torch.device("cpu"), "int8")
    assert isinstance(quantised.media_encoder, Encoder)
    assert torch.equal(encoded(ForwardRunner(quantised.media_encoder, ops), name, [0], ON_CPU)[0], plain[0])
    targets = AdapterTargets(read_architecture(files)[0], quantised)
    of_tower = {path for path in dict(walk(quantised)) if path.startswith("vis")}
    assert len(of_tower) > 10
    assert not of_tower & set(targets.targets)
    prefix = "model.language_model" if name in (*QWEN, "gemma3", "mistral3") else "model.text_model"
    number = next(i for i in range(8) if f"model.layers.{i}.self_attn.q_proj" in targets.targets)  # some have none
    assert targets.path_of(f"{prefix}.layers.{number}.self_attn.q_proj") == f"model.layers.{number}.self_attn.q_proj"


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_estimate_of_the_memory_has_the_tower(name: str, quantization: str | None, folders):
    """All of it, in the compute type: what is left out when another stage has it."""
    files = identify(folders(name))
    shares = SharesInMemory(files, PreparedAs("bfloat16", quantization, False, 100))
    model = read_model(files)
    encoder = model.media_encoder
    assert encoder is not None
    declared = [parameter.declared for _, parameter in parameters(encoder)]
    matrices = sum(2 * one.rows * one.columns for one in declared if isinstance(one, Matrix | Table))
    whole = shares.weights(model)
    encoder.is_elsewhere = True
    assert matrices < whole - shares.weights(model) < 1.5 * matrices + 2 * 4 * 4096 * 16
