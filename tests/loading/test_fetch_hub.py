import errno
import fnmatch
import sys
import types
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from pagoda.base.errors import CapacityError, ConfigError
from pagoda.loading.fetch_hub import HubModel, fetch_hub, is_complete

MODEL = HubModel("org/name")


def hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    request = httpx.Request("GET", "https://example.invalid")
    return kind("refused", response=httpx.Response(404, request=request))


def answer_online(monkeypatch: pytest.MonkeyPatch, result: Exception | Path) -> None:
    """The hub library finds nothing in its cache and gives `result` when it may go online."""

    def snapshot_download(*_: object, local_files_only: bool, **__: object) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (hub_error(errors.RepositoryNotFoundError), ConfigError, "the hub has no 'org/name'"),
        (hub_error(errors.GatedRepoError), ConfigError, "org/name is gated"),
        (hub_error(errors.RevisionNotFoundError), ConfigError, "org/name has no revision"),
        (httpx.ConnectError("refused"), ConfigError, "no network: org/name"),
        (errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), ConfigError, "no network: org/name"),
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError, "disk full while fetching org/name"),
    ],
)
def test_what_the_hub_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], words: str
) -> None:
    answer_online(monkeypatch, error)
    with pytest.raises(kind, match=words):
        fetch_hub(MODEL, "huggingface", tmp_path)


def test_a_repository_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    answer_online(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json with its safetensors weights.*ORG/NAME:FILE\.gguf"):
        fetch_hub(MODEL, "huggingface", tmp_path)


def test_a_broken_index_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert is_complete(tmp_path, MODEL)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_ma')
    assert not is_complete(tmp_path, MODEL)


def with_modelscope(monkeypatch: pytest.MonkeyPatch, snapshot_download: object) -> None:
    module = types.ModuleType("modelscope")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)


def test_modelscope_is_called_with_its_own_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.append({"repo_id": repo_id, **options})
        if options["local_files_only"]:
            raise ValueError("not cached")
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "m.safetensors").write_bytes(b"")
        return str(tmp_path)

    with_modelscope(monkeypatch, snapshot_download)
    assert fetch_hub(HubModel("org/name", revision="v1"), "modelscope", tmp_path) == tmp_path
    assert [(call["repo_id"], call["revision"], call["local_files_only"]) for call in asked] == [
        ("org/name", "v1", True),
        ("org/name", "v1", False),
    ]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConnectionError("unreachable"), ConfigError, "no network: org/name"),
        (ValueError("no such model"), ConfigError, "modelscope could not fetch org/name: no such model"),
        (OSError(errno.ENOSPC, "full"), CapacityError, "disk full"),
    ],
)
def test_what_modelscope_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], words: str
) -> None:
    def snapshot_download(*_: object, local_files_only: bool, **__: object) -> str:
        raise ValueError("not cached") if local_files_only else error

    with_modelscope(monkeypatch, snapshot_download)
    with pytest.raises(kind, match=words):
        fetch_hub(MODEL, "modelscope", tmp_path)


def test_modelscope_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="pip install modelscope"):
        fetch_hub(MODEL, "modelscope", tmp_path)


def test_a_gguf_file_is_found_by_its_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def snapshot_download(*_: object, allow_patterns: list[str], **__: object) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for name in ("m-Q4_K_M.gguf", "m.q8_0.gguf", "m-IQ4_XS.gguf", "m-Q4_K_S.gguf"):
        (tmp_path / name).touch()
    for quantization, file in (("Q4_K_M", "m-Q4_K_M.gguf"), ("Q8_0", "m.q8_0.gguf"), ("q4_k_s", "m-Q4_K_S.gguf")):
        model = HubModel.parse(f"org/name:{quantization}")
        assert fetch_hub(model, "huggingface", tmp_path) == tmp_path
        assert model.file_in(tmp_path) == tmp_path / file
        assert any(fnmatch.fnmatchcase(file, str(pattern)) for pattern in asked)
    for missing in ("Q4_XS", "Q2_K"):  # IQ4_XS is another quantization than Q4_XS
        with pytest.raises(ConfigError, match=f"no {missing} in the cache"):
            fetch_hub(HubModel.parse(f"org/name:{missing}"), "huggingface", tmp_path)
    (tmp_path / "other-Q8_0.gguf").touch()
    with pytest.raises(ConfigError, match=r"several files have this quantization: m\.q8_0\.gguf, other-Q8_0\.gguf"):
        fetch_hub(HubModel.parse("org/name:Q8_0"), "huggingface", tmp_path)


def test_a_gguf_model_in_several_files_is_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the quantization, or the name of the first file; a snapshot that lacks a file is not complete."""
    parts = [f"Q4_K_M/m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    (tmp_path / "Q4_K_M").mkdir()

    def snapshot_download(*_: object, allow_patterns: list[str], local_files_only: bool, **__: object) -> str:
        for part in parts:
            if not local_files_only and any(fnmatch.fnmatchcase(part, pattern) for pattern in allow_patterns):
                (tmp_path / part).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for name in ("Q4_K_M", parts[0]):
        model = HubModel.parse(f"org/name:{name}")
        (tmp_path / parts[1]).unlink(missing_ok=True)
        assert model.file_in(tmp_path) is None
        fetch_hub(model, "huggingface", tmp_path)
        assert model.file_in(tmp_path) == tmp_path / parts[0]
        assert all((tmp_path / part).exists() for part in parts)
