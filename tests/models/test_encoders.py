"""Each encoder-only model, as a tiny random checkpoint, computes what transformers computes."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingKind
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_model
from pagoda.loading.model_files import identify
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.device_under_test import ON_CPU, DeviceUnderTest
from tests.models.tiny_encoders import CONFIGS, batch_of, make_encoder, save_encoder, states, texts

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 1, 130, 23, 300)
Folders = Callable[..., Path]


@cache
def reference(name: str, head: str = "", num_labels: int = 3) -> PreTrainedModel:
    return make_encoder(name, head, num_labels)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """(name, head, labels) -> checkpoint folder, made when first asked for."""

    @cache
    def folder(name: str, head: str = "", num_labels: int = 3) -> Path:
        return save_encoder(reference(name, head, num_labels), tmp_path_factory.mktemp(name))

    return folder


def load(
    folder: Path, on: DeviceUnderTest, kernels: str = "torch", dtype: torch.dtype = torch.float32, threads: int = 1
) -> ForwardRunner:
    """kernels: on the CPU, where "auto" are the native ones."""
    ops = on.ops(kernels, threads)
    model = load_model(identify(folder), ops, dtype, on.device)
    return ForwardRunner(model, ops, recorder=Programs(ops) if isinstance(ops, NativeOps) else None)


def expected(name: str, rows: list[list[int]], types: list[list[int]] | None = None) -> list[torch.Tensor]:
    """transformers' final hidden states, text by text."""
    found = []
    for i, row in enumerate(rows):
        more = {"token_type_ids": torch.tensor([types[i]])} if types is not None else {}
        found.append(reference(name)(torch.tensor([row]), **more).last_hidden_state[0])
    return found


def assert_close(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], on: DeviceUnderTest) -> None:
    """A GPU sums in other orders than transformers on a CPU, and its exponentials are approximate."""
    tolerance = 1e-5 if on.device.type == "cpu" else 1e-4
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernels", ["torch", "native", "reference"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_equal(name: str, kernels: str, folders: Folders, on: DeviceUnderTest) -> None:
    rows = texts(*LENGTHS)
    assert_close(states(load(folders(name), on, kernels), rows, on.device), expected(name, rows), on)


@pytest.mark.parametrize("name", ["bert", "bert-relu"])
def test_token_types_of_pairs(name: str, folders: Folders, on: DeviceUnderTest) -> None:
    rows = texts(9, 40)
    types = [[0] * 4 + [1] * 5, [0] * 25 + [1] * 15]
    model = load(folders(name), on, "auto")
    assert_close(states(model, rows, on.device, types=types), expected(name, rows, types), on)
    assert not torch.allclose(states(model, rows, on.device)[0], expected(name, rows, types)[0], atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_it_has_the_same_bits_in_any_batch(name: str, folders: Folders) -> None:
    """Whichever texts run in the same batch, on whatever number of threads, and whichever tokens are wanted."""
    rows = texts(*LENGTHS)
    alone = load(folders(name), ON_CPU, "native")
    plain = ForwardRunner(alone.model, alone.ops)
    want = [states(plain, [row])[0] for row in rows]
    for threads in (1, 2):
        model = load(folders(name), ON_CPU, "native", threads=threads)
        for order in ((3, 0, 4), (4, 2, 1, 0), (1,), (2, 2)):
            for i, got in zip(order, states(model, [rows[i] for i in order]), strict=True):
                assert torch.equal(got, want[i])
        batch = batch_of(rows, alone.model.num_token_types, index=[0, 5, 6, 140, 458])
        flat = torch.cat(want)
        assert torch.equal(model.run(batch, []).hidden, flat[[0, 5, 6, 140, 458]])
        assert isinstance(model.recorder, Programs)
        assert len(model.recorder._programs) == 1
        assert None not in model.recorder._programs.values()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_half_precision_stays_near(name: str, dtype: torch.dtype, folders: Folders, on: DeviceUnderTest) -> None:
    """As near as transformers' own, times two; and the same bits alone and batched."""
    rows = texts(40, 7, 61)
    exact = torch.cat(expected(name, rows))
    theirs = make_encoder(name).to(dtype)
    rounded = torch.cat([theirs(torch.tensor([row])).last_hidden_state[0].float() for row in rows])
    model = load(folders(name), on, "auto", dtype)
    ours = states(model, rows, on.device)
    assert (torch.cat(ours).float() - exact).norm() <= 2 * (rounded - exact).norm()
    if type(model.ops) is not TorchOps:  # whose bits depend on the batch
        assert torch.equal(ours[1], states(model, [rows[1]], on.device)[0])


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_classification_heads(name: str, num_labels: int, folders: Folders, on: DeviceUnderTest) -> None:
    model = load(folders(name, "classifier", num_labels), on, "auto")
    plan = model.model.pooling
    assert len(plan.labels) == num_labels
    assert plan.label_activation == ("sigmoid" if num_labels == 1 else "softmax")
    assert not plan.embeds
    rows = texts(12, 31)
    pooled = [part[0] if plan.kind is PoolingKind.CLS else part.mean(0) for part in states(model, rows, on.device)]
    ours = model.classify(torch.stack(pooled).to(on.device)).cpu()
    theirs = [reference(name, "classifier", num_labels)(torch.tensor([row])).logits[0] for row in rows]
    assert_close(list(ours), theirs, on)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_encoder_of_a_masked_language_model(name: str, folders: Folders, on: DeviceUnderTest) -> None:
    rows = texts(12, 31)
    theirs = reference(name, "mlm").base_model
    want = [theirs(torch.tensor([row])).last_hidden_state[0] for row in rows]
    assert_close(states(load(folders(name, "mlm"), on, "auto"), rows, on.device), want, on)


def test_old_names_of_norms(tmp_path: Path, folders: Folders, on: DeviceUnderTest) -> None:
    """LayerNorm.gamma and beta, within `bert.`, as the first BERT checkpoints have them."""
    for file in folders("bert").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    rows = texts(12)
    assert_close(states(load(tmp_path, on), rows, on.device), expected("bert", rows), on)


def test_int8_stays_near(folders: Folders, on: DeviceUnderTest) -> None:
    ops = on.ops("auto")
    loaded = load_model(identify(folders("bert")), ops, torch.float32, on.device, quantization="int8")
    model = ForwardRunner(loaded, ops)
    rows = texts(40)
    ours, exact = states(model, rows, on.device)[0], expected("bert", rows)[0]
    assert 0 < (ours - exact).norm() < 0.05 * exact.norm()


def test_longest_text(folders: Folders, on: DeviceUnderTest) -> None:
    """RoBERTa's positions start after the id of its padding."""
    for name, longest in (("bert", 320), ("roberta", 316), ("xlm-roberta", 318), ("modernbert", 320)):
        assert read_model(identify(folders(name))).spec.max_position == longest
        rows = texts(longest)
        assert_close(states(load(folders(name), on), rows, on.device), expected(name, rows), on)


@pytest.mark.parametrize(
    ("name", "setting", "value", "said"),
    [
        ("bert", "is_decoder", True, "is_decoder = True is not supported"),
        ("bert", "position_embedding_type", "relative_key", "position_embedding_type = 'relative_key'"),
        ("bert", "hidden_act", "mish", "hidden_act 'mish' is not supported; supported: gelu"),
        ("roberta", "max_position_embeddings", 4, "the first 4 are not used"),
        ("roberta", "id2label", {"0": "no", "2": "yes"}, "a name for each of the outputs 0 to 1"),
        ("bert", "sbert_ce_default_activation_function", "torch.nn.modules.activation.Tanh", "Tanh' is not supported"),
        ("bert", "sbert_ce_default_activation_function", "mine.Identity", "mine.Identity' is not supported"),
        ("modernbert", "hidden_activation", "mish", "hidden_activation 'mish' is not supported"),
        ("modernbert", "layer_types", ["linear_attention"] * 4, "layer_types[0] 'linear_attention'"),
        ("modernbert", "classifier_pooling", "max", "classifier_pooling 'max'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, setting: str, value: object, said: str, tmp_path: Path, folders: Folders
) -> None:
    folder = folders(name, "classifier", 2)
    values = json.loads((folder / "config.json").read_text()) | {setting: value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        read_model(identify(tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("problem", "activation"),
    [("regression", "identity"), ("multi_label_classification", "sigmoid"), ("single_label_classification", "softmax")],
)
def test_the_problem_decides_what_labels_mean(problem: str, activation: str, tmp_path: Path, folders: Folders) -> None:
    folder = folders("bert", "classifier", 1)
    values = json.loads((folder / "config.json").read_text()) | {"problem_type": problem}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert read_model(identify(tmp_path)).pooling.label_activation == activation


def test_labels_and_activation_of_a_cross_encoder(tmp_path: Path, folders: Folders) -> None:
    folder = folders("bert", "classifier", 1)
    values = json.loads((folder / "config.json").read_text())
    values |= {
        "id2label": {"0": "relevant"},
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    plan = read_model(identify(tmp_path)).pooling
    assert (plan.labels, plan.label_activation, plan.kind) == (("relevant",), "identity", PoolingKind.CLS)
