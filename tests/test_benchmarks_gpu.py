"""benchmarks/gpu.py: what it computes from what it measures. Its parts are tried with --rehearse."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Bench, Result, append_result, estimated_s, main, read_results
from benchmarks.gpu_idle import busy_us, longest_gaps_us
from benchmarks.gpu_shares import ModelBytes, shares_of_ceilings
from benchmarks.gpu_tests import FILES
from benchmarks.host_step import measure
from benchmarks.make_random_model import SHAPES, make


def test_kernels_that_overlap_are_counted_once() -> None:
    spans = [(10.0, 14.0), (0.0, 5.0), (3.0, 8.0), (11.0, 12.0), (20.0, 21.0)]
    assert busy_us(spans) == 8 + 4 + 1
    assert longest_gaps_us(spans) == [6.0, 2.0]
    assert busy_us([]) == 0
    assert longest_gaps_us(spans[:1]) == []


def test_what_a_step_reads(tmp_path: Path) -> None:
    """A table of embeddings is read once per step where it is the head, and else not at all."""
    make(SHAPES["tiny"], tmp_path / "tied")
    make(replace(SHAPES["tiny"], tie_word_embeddings=False), tmp_path / "not")
    tied, apart = ModelBytes.of(tmp_path / "tied"), ModelBytes.of(tmp_path / "not")
    shape = SHAPES["tiny"]
    assert tied.head == apart.head == 2 * shape.vocab_size * shape.hidden_size
    assert tied.body == pytest.approx(apart.body, rel=1e-2)  # but for the header of the file
    weights = tied.body / 2 / shape.num_hidden_layers
    per_layer = shape.hidden_size * (
        2 * shape.head_dim * (shape.num_attention_heads + shape.num_key_value_heads) + 3 * shape.intermediate_size
    )
    assert weights == pytest.approx(per_layer, rel=5e-2)
    assert tied.kv_per_token == 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim


def test_shares_of_what_the_card_reaches() -> None:
    card = {"copy_bytes_per_s": 4e12, "bf16_flops_per_s": 8e14}
    model = ModelBytes(body=int(14e9), head=int(1e9), kv_per_token=131072)
    work = [{"prompt_token_ids": [5] * 16, "max_tokens": 100}] * 8
    shares = shares_of_ceilings({"secs": 2.0}, work, model, card, is_decode=True)
    seen = 8 * sum(16 + step for step in range(100))
    assert shares["share_of_bandwidth"] == pytest.approx((100 * 15e9 + 131072 * seen) / 2 / 4e12)
    assert shares["share_of_flops"] == pytest.approx((14e9 * 8 * 116 + 1e9 * 800) / 2 / 8e14)
    assert "share_of_bandwidth" not in shares_of_ceilings({"secs": 2.0}, work, model, card, is_decode=False)
    assert shares_of_ceilings({"secs": 2.0}, work, model, {}, is_decode=True) == {}


def test_a_result_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cuda")
    assert read_results(bench.results) == []
    whole = {"part": "ceilings", "copy_bytes_per_s": 1.0}
    bench.results.write_text(json.dumps(whole) + "\n" + '{"part": "host", "ho')
    assert read_results(bench.results) == [whole]
    assert bench.ceilings() == whole


def test_a_result_after_one_that_was_cut_off_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_result(path, {"part": "compile"})
    path.write_text(path.read_text() + '{"part": "host", "ho')
    append_result(path, {"part": "ceilings"})
    append_result(path, {"part": "host"})
    assert [found["part"] for found in read_results(path)] == ["compile", "ceilings", "host"]


WORK = [{"prompt_token_ids": [5, 6], "max_tokens": 10}, {"prompt_token_ids": [7], "max_tokens": 10}]


def answered(command: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    """What a part's commands print, with made-up figures. They take no time and need no GPU."""
    assert 0 < timeout_s <= gpu.LIMIT_S
    script = next(word for word in command[1:] if word not in ("-m", "bench"))
    if script.endswith("make_random_model.py"):
        folder = Path(command[command.index("--device") - 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(bytes(64))
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
        (folder / "config.json").write_text(json.dumps({**dict.fromkeys(sizes, 2), "tie_word_embeddings": True}))
        return ""
    return {
        "pagoda": '{"in": 10, "out": 20, "secs": 2.0, "out_tok_s": 10.0}\n',
        "benchmarks.gpu_ceilings": '{"device": "made up", "copy_bytes_per_s": 4e3, "bf16_flops_per_s": 8e3}\n',
        "benchmarks.host_step": '{"rows": 1}\n{"rows": 8}\n',
        "benchmarks.gpu_idle": '{"idle": 0.04}\n',
        "benchmarks.kernel_report": "| op |\n",
        "pytest": "....\n4 passed in 1 s\n",
        "-c": "True",
    }.get(script, json.dumps(WORK) if script.endswith("workload.py") else '{"tok_s": 1.0}\n')


def test_every_part_starts_and_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run", answered)
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    main(["--folder", str(tmp_path)])
    found = {str(result["part"]): result for result in read_results(tmp_path / "results.jsonl")}
    assert list(found) == list(Bench(tmp_path, "cuda").parts())
    assert not [name for name, result in found.items() if "failed" in result]
    assert found["qwen3-0.6b:decode8"]["share_of_bandwidth"] == pytest.approx((10 * 64 + 32 * 120) / 2 / 4e3)
    assert found["tests:kernels/test_moe"]["tests"] == "4 passed in 1 s"
    assert found["qwen3-0.6b:nano256:vllm"]["tok_s"] == 1.0
    kept = [path.parent.name for path in (tmp_path / "models").glob("*/model.safetensors")]
    assert kept == ["qwen3-0.6b"], "the models of earlier parts take the disk's room"


def test_every_file_with_tests_of_numbers_is_a_part() -> None:
    """But for those that need a downloaded model. Which are is read off their text: collecting tests takes long."""
    tests = Path(__file__).parent
    uses = r"\b(device_under_test|on_the_device|make_triton_ops|triton_ops|pytest\.mark\.gpu)\b"
    of_kernels = re.compile(rf"{uses}|\bfast\b")
    found = set[str]()
    for path in tests.rglob("test_*.py"):
        pattern = of_kernels if path.parent.name == "kernels" else re.compile(uses)
        if pattern.search(path.read_text()):
            found.add(path.relative_to(tests).with_suffix("").as_posix())
    assert set(FILES) - found == {"engine/test_beams_with_grammars"}  # by a fixture of another file
    others = {"test_benchmarks_gpu", "test_conftest", "kernels/test_carried_ops", "models/test_captured_models"}
    others |= {"kernels/test_short_conv", "kernels/test_scan", "engine/test_drafts_with_states"}  # states are for CPUs
    others |= {"models/test_llama_cpp"}  # beside its CPU kernels
    others |= {"loading/test_packed_cache"}  # weights as the kernels of CPUs have them
    others |= {"models/test_ranks"}  # which reads the names of models there
    downloaded = {f"parity/test_{name}" for name in ("beam_search", "lora", "perplexity", "smollm2")}
    downloaded |= {"models/test_minilm", "models/test_real_models"}
    assert found - set(FILES) == others | downloaded


@pytest.fixture
def run_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run made-up parts on a made-up GPU; return those that were started."""

    def call(parts: Mapping[str, Callable[[], Result]], *arguments: str) -> list[str]:
        started: list[str] = []

        def noted(name: str) -> Callable[[], Result]:
            return lambda: started.append(name) or parts[name]()

        monkeypatch.setattr(Bench, "parts", lambda self: {name: noted(name) for name in parts})
        monkeypatch.setattr(gpu, "has_gpu", lambda: True)
        try:
            main(["--folder", str(tmp_path), *arguments])
        except (SystemExit, KeyboardInterrupt) as end:
            started.append(f"{type(end).__name__}: {end}")
        return started

    return call


def test_parts_that_do_not_fit_are_left_to_the_next_run(
    run_parts: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, Callable[[], Result]] = {
        "ceilings": lambda: {"x": 1}, "llama-3.1-8b:decode1": lambda: {"x": 2}, "host": lambda: {"x": 3}
    }  # fmt: skip
    assert run_parts(parts, "--budget", "100") == ["ceilings", "host"]
    assert "llama-3.1-8b:decode1: the rest of --budget is too short" in capsys.readouterr().out
    assert run_parts(parts, "--budget", "540") == ["llama-3.1-8b:decode1"]


def test_the_figures_with_targets_fit_into_three_runs() -> None:
    """Each of at most ten minutes, of which the start of a machine takes some."""
    wanted = {"ceilings", "qwen3-0.6b:nano256", "qwen3-0.6b:nano256:transformers", "llama-3.1-8b:decode1"}
    wanted |= {f"qwen3-0.6b:idle{batch}" for batch in gpu.IDLE_BATCHES}
    left, runs = list(Bench(Path(), "cuda").parts()), 0
    while wanted & set(left):
        remaining_s, runs = 540.0, runs + 1
        for name in list(left):
            if estimated_s(name) <= remaining_s:
                remaining_s -= estimated_s(name)
                left.remove(name)
    assert runs <= 3
    assert all(estimated_s(name) <= gpu.LIMIT_S for name in Bench(Path(), "cuda").parts())


def test_without_vllm_its_part_says_so(tmp_path: Path) -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    found = Bench(tmp_path, "cuda").measure("vllm", lambda: Bench(tmp_path, "cuda").vllm("tiny", "nano256"))
    assert str(found["failed"]).endswith("has no vLLM")


def interrupted() -> Result:
    raise KeyboardInterrupt


def test_an_interrupted_run_continues(run_parts: Callable[..., list[str]]) -> None:
    parts: dict[str, Callable[[], Result]] = {"a": lambda: {"x": 1}, "b": interrupted, "c": lambda: {"x": 3}}
    assert run_parts(parts) == ["a", "b", "KeyboardInterrupt: "]
    parts["b"] = lambda: {"x": 2}
    assert run_parts(parts) == ["b", "c"]
    assert run_parts(parts) == []
    assert run_parts(parts, "--again", "--only", "c") == ["c"]


def test_what_could_not_be_measured_is_marked_and_tried_again(
    run_parts: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, ways = Bench(tmp_path, "cuda"), ("import sys; print('no library'); sys.exit(3)", "print('not JSON')")
    parts: dict[str, Callable[[], Result]] = {
        "status": lambda: {"said": bench.run([sys.executable, "-c", ways[0]])},
        "output": lambda: json.loads(bench.run([sys.executable, "-c", ways[1]])),
        "ceilings": lambda: {}[0],
        "works": lambda: {"x": 1},
    }
    assert run_parts(parts) == ["status", "output", "ceilings", "works", "SystemExit: 3 parts failed"]
    results = {found["part"]: found for found in read_results(bench.results)}
    assert str(results["status"]["failed"]).endswith("returned non-zero exit status 3.: no library")
    assert (tmp_path / "failures.txt").read_text() == "==== status\nno library\n\n"
    assert str(results["output"]["failed"]).startswith("JSONDecodeError")
    assert "works: {" in (said := capsys.readouterr().out)
    assert "output: JSONDecodeError" in said[said.index("Not measured:") :]
    assert bench.ceilings() == {}
    parts["ceilings"] = lambda: {"copy_bytes_per_s": 1.0}
    parts["new"] = lambda: {"x": 2}
    assert run_parts(parts)[:4] == ["new", "status", "output", "ceilings"], "what failed comes last"
    assert bench.ceilings()["copy_bytes_per_s"] == 1.0
    assert run_parts(parts, "--only", "ceilings", "works") == []


def test_a_part_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    """Its time is for all of its commands. A grandchild that holds the output open delays nothing."""
    begin_s, bench = time.monotonic(), Bench(tmp_path, "cuda", limit_s=6.0)
    start = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid"
    hangs = f"{start}, file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True); print('begun', flush=True); "
    hangs += "import time; time.sleep(600)"

    def part() -> Result:
        bench.run([sys.executable, "-c", "import time; time.sleep(3)"])
        return {"said": bench.run([sys.executable, "-c", hangs])}

    assert bench.measure("slow", part) == {"failed": "it took longer than 6 s"}
    assert "==== slow\nbegun\n" in (tmp_path / "failures.txt").read_text()
    assert time.monotonic() - begin_s < 300
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_a_terminated_run_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeps = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    runs = f"from benchmarks import gpu; gpu.exit_on_signals(); gpu.run([{sys.executable!r}, '-c', {sleeps!r}], 60)"
    process = subprocess.Popen([sys.executable, "-c", runs], cwd=gpu.HERE.parent)
    wait_until(lambda: pid.exists() and pid.read_text() != "")
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(int(pid.read_text())))


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and that nothing has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_gpu_the_rest_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "run", answered)
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    main(["--folder", str(tmp_path), "--only", "host", "ceilings", "llama-3.1-8b:decode"])
    assert [found["part"] for found in read_results(tmp_path / "results.jsonl")] == ["host"]
    marked = "ceilings, llama-3.1-8b:decode1, llama-3.1-8b:decode8, llama-3.1-8b:decode64, llama-3.1-8b:decode256"
    assert f"    {marked}: torch sees no GPU here" in capsys.readouterr().out


def test_a_rehearsal_has_a_part_of_every_kind() -> None:
    def kinds(device: str) -> set[str]:
        names = [name for name in Bench(Path(), device).parts() if not name.startswith("tests:") or device == "cpu"]
        return {name.rpartition(":")[2].rstrip("0123456789") for name in names}

    assert f"tests:{FILES[0]}" in Bench(Path(), "cpu").parts()
    assert kinds("cuda") - kinds("cpu") == {"nano", "prefill8k", "prefix", "chat", "transformers", "vllm"}


def test_the_hosts_part_of_a_step_is_measured_with_a_made_up_device() -> None:
    found = measure(num_rows=3, num_steps=5)
    assert found["step_us"] >= found["worker_us"] > 0
    for is_async in (False, True):  # on a CPU that is not this one's
        found = measure(num_rows=3, num_steps=8, forward_s=0.001, is_async=is_async)
        assert found["step_us"] > 1000
        assert found["gap_us"] > 0
