"""What a tree declares is what the checkpoint holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pagoda.kernels.linear.reference import PlainLinear
from pagoda.kernels.select import select_ops
from pagoda.layers.lora_targets import lora_targets
from pagoda.layers.module import Module, parameters, walk
from pagoda.layers.parameter import Matrix, Parameter, RotaryTable, Table, Taps, Vector
from pagoda.layers.sharding import shard_of
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture, read_model
from pagoda.loading.model_files import identify
from pagoda.loading.pieces import bias_pieces, weight_pieces
from pagoda.models.base import Model
from pagoda.models.naming import Naming
from pagoda.worker.devices.cpu import CpuDevice
from tests.models.tiny import CONFIGS, VOCAB, make_model, save

CPU = torch.device("cpu")


def declared_tensors(model: Model, naming: Naming) -> dict[str, tuple[int, ...]]:
    """Names and shapes of everything that a checkpoint of this tree must hold."""
    found: dict[str, tuple[int, ...]] = {}
    for path, parameter in parameters(model):
        declared = parameter.declared
        if isinstance(declared, Table):
            found[naming.find(path).name] = (declared.rows, declared.columns)
        elif isinstance(declared, Vector) and not declared.zeros:
            vector = naming.find(path)
            found[vector.name] = vector.shape_of_vector(declared.size)
        elif isinstance(declared, Taps):
            found[naming.find(path).name] = (declared.channels, 1, declared.taps)
        elif isinstance(declared, Matrix) and declared.tied is None:
            whole = shard_of(declared, 0, 1)
            for expert in range(max(1, declared.num_experts)):
                found |= {piece.name: piece.shape for piece in weight_pieces(naming, path, declared, whole, expert)}
            if declared.bias:
                found |= {piece.name: piece.shape for piece in bias_pieces(naming, path, declared, whole)}
    return found


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma3-multimodal"])
def test_a_tree_declares_the_tensors_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    folder = save(make_model(name), tmp_path)
    files = identify(folder)
    stored = {key: tuple(tensor.shape) or (1,) for key, tensor in load_file(folder / "model.safetensors").items()}
    naming = read_architecture(files)[0].hf[0]
    assert declared_tensors(read_model(files), naming) == stored


def test_shared_modules_and_parameters_are_visited_once(tmp_path: Path) -> None:
    model = read_model(identify(save(make_model("gemma3"), tmp_path)))
    tables = [path for path, parameter in parameters(model) if isinstance(parameter.declared, RotaryTable)]
    assert tables == ["model.layers.0.self_attn.rotary.tables", "model.layers.5.self_attn.rotary.tables"]
    seen = [module for _, module in walk(model)]
    assert len({id(module) for module in seen}) == len(seen)


def test_children_are_modules_parameters_and_lists_of_modules() -> None:
    class Leaf(Module):
        def __init__(self) -> None:
            self.weight = Parameter[object](Vector(3))

    class Root(Module):
        def __init__(self) -> None:
            self.first, self.items, self.number, self.names = Leaf(), [Leaf(), Leaf()], 7, ["a", "b"]
            self.again = self.first

    assert [path for path, _ in parameters(Root())] == ["first.weight", "items.0.weight", "items.1.weight"]


def test_a_parameter_that_is_not_loaded_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not loaded"):
        _ = Parameter[object](Vector(3)).value


def test_lora_targets_are_parts_of_fused_weights(tmp_path: Path) -> None:
    theirs = make_model("llama-tied-biased")
    model = load_model(identify(save(theirs, tmp_path)), select_ops("reference", CpuDevice(1)), torch.float32, CPU)
    targets = lora_targets(model)
    stored = theirs.state_dict()
    per_layer = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in targets} == per_layer | {"lm_head", "embed_tokens"}
    assert len(targets) == 3 * len(per_layer) + 2
    embedding = targets.pop("model.embed_tokens")
    assert (embedding.is_embedding, embedding.inputs, embedding.rows) == (True, VOCAB, range(96))
    for name, target in targets.items():
        weight = target.parameter.value
        assert isinstance(weight, PlainLinear)
        assert target.inputs == weight.in_features
        rows = weight.weight[target.rows.start : target.rows.stop]
        assert torch.equal(rows, stored[f"{name}.weight"])
