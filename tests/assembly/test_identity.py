"""What of a model's files is its weights, and what else of them requests and answers depend on."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from pagoda.assembly.engine_setup import EngineSetup, resolve_engine
from pagoda.assembly.identity import digest_of_weights, parts_beside_weights, root_of_blocks
from pagoda.base.config import EngineConfig
from pagoda.loading.model_files import ModelFiles
from tests.engine.byte_llama import write_byte_llama
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import make_model


def setup_of(model: Path) -> EngineSetup:
    return resolve_engine(EngineConfig.from_options(model=str(model)))


def changed(one: EngineSetup, other: EngineSetup) -> set[str]:
    return {name for name, _ in parts_beside_weights(one).items() ^ parts_beside_weights(other).items()}


def test_other_weights_of_a_model_differ_in_nothing_else(tmp_path: Path) -> None:
    one, again, other = (setup_of(write_byte_llama(tmp_path / str(at), seed)) for at, seed in enumerate((1, 1, 2)))
    digests = [digest_of_weights(setup.files) for setup in (one, again, other)]
    assert digests[0] == digests[1] != digests[2]
    assert changed(one, other) == set()
    (other.files.path / "README.md").write_text("other weights")
    assert changed(one, other) == set()
    assert digest_of_weights(other.files) == digests[2]


def test_weights_that_differ_in_a_single_byte_are_others(tmp_path: Path) -> None:
    data, digests = bytearray(4 << 20), set[str]()
    for at in (0, 5_000, 1_234_567, 2_000_000, len(data) - 1):
        data[at] ^= 1
        (tmp_path / "model.safetensors").write_bytes(data)
        digests.add(digest_of_weights(ModelFiles("a", tmp_path, "safetensors")))
    assert len(digests) == 5


def test_what_else_differs_is_named(tmp_path: Path) -> None:
    one, other = (write_byte_llama(tmp_path / name) for name in ("one", "other"))
    (other / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "_name_or_path": "other"}))
    assert changed(setup_of(one), setup_of(other)) == {"chat_template.jinja"}
    (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    assert changed(setup_of(one), setup_of(other)) == {"chat_template.jinja", "its architecture"}


@pytest.mark.parametrize("package", ["pagoda-llm", "torch"])
def test_blocks_of_another_version_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    setup, version = setup_of(write_byte_llama(tmp_path / "model")), metadata.version
    root = root_of_blocks(setup)
    assert root_of_blocks(setup) == root
    monkeypatch.setattr(metadata, "version", lambda name: version(name) + ".1" if name == package else version(name))
    assert root_of_blocks(setup) != root


def test_of_a_gguf_the_tokenizer_is_compared(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    write_gguf(make_model("llama"), one, GGMLQuantizationType.F32)
    data = bytearray(one.read_bytes())
    other.write_bytes(data)
    assert changed(setup_of(one), setup_of(other)) == set()
    key = b"tokenizer.ggml.bos_token_id"
    data[data.index(key) + len(key) + 4] ^= 1  # after its type
    other.write_bytes(data)
    assert key.decode() in changed(setup_of(one), setup_of(other))
