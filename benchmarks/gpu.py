#!/usr/bin/env python3
"""Measure the engine on a GPU, part by part. Needs no network: weights of real shapes are made on the spot.

    gpu.py [--only PART ...] [--budget SECONDS] [--again] [--folder build/gpu] [--list] [--rehearse]
           [--vllm-python PYTHON]

Each part takes less than 8 minutes, or is stopped, and appends one JSON line to FOLDER/results.jsonl; parts that are
there already are left out, so an interrupted run continues. A part that failed has a line with "failed" and the reason,
and its output is in FOLDER/failures.txt; the next run tries it again, after the others. The most telling parts come
first (--list prints the order). With --budget a run takes at most so long, and leaves parts that need more than the
rest of it to the next run: by our estimate, three runs of --budget 540 give all figures that have targets. Without a
GPU only `compile` and `host` run. What the parts are:

    compile                 registers, spills and shared memory of all kernels, compiled for sm_80 and sm_90
    host                    what a step costs the host, with a device that computes nothing
    tests:FILE              the tests of numbers, on the GPU; with :slow, those that are marked so
    ceilings                the memory bandwidth and the bfloat16 products per second that the card reaches
    SHAPE:WORKLOAD          output tokens per second, from `pagoda bench throughput`; with the shares of the ceilings
    SHAPE:idleN             share of the time without a kernel running, while N sequences decode
    SHAPE:WORKLOAD:invariant    the same with --batch-invariant
    SHAPE:WORKLOAD:sampled      the same with tokens drawn as Qwen3's model card says, not the most likely ones
    SHAPE:WORKLOAD:eager        the same with torch's kernels and without graphs
    SHAPE:WORKLOAD:transformers continuous batching of transformers, on the same card
    SHAPE:WORKLOAD:vllm         vLLM on the same card, where the Python of --vllm-python has it (this one, by default)

Every engine runs a workload twice, and the second time is measured: the first compiles kernels and captures graphs.

--rehearse runs all of it on the CPU with a tiny model and small inputs, in a folder of its own: it proves the script,
and measures nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # as a script it sees its own folder only

from benchmarks.gpu_shares import ModelBytes, Result, shares_of_ceilings  # noqa: E402
from benchmarks.gpu_tests import FILES, NO_TESTS, command_of  # noqa: E402

LIMIT_S = 470
WITHOUT_GPU = ("compile", "host")

SHAPES = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b")
WORKLOADS = ("nano256", "decode1", "decode8", "decode64", "decode256", "prefill8k", "prefix64", "chat")
IDLE_BATCHES = (1, 64, 256)
VARIANTS = {
    "": [],
    "invariant": ["--batch-invariant"],
    "sampled": ["--temperature", "0.6", "--top-p", "0.95", "--top-k", "20"],
    "eager": ["--kernels", "torch"],
}
REHEARSED = "tiny"


@dataclass(slots=True)
class Bench:
    """Where things are measured.

    device: "cuda", or "cpu" for a rehearsal.   limit_s: for each part.   ends_s: when the part that runs is stopped, by
        the monotonic clock.
    """

    folder: Path
    device: str
    limit_s: float = LIMIT_S
    ends_s: float = float("inf")
    vllm_python: str = sys.executable

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"

    def parts(self) -> dict[str, Callable[[], Result]]:
        """Return every part by name, the most telling first."""
        shapes = (REHEARSED,) if self.is_rehearsal else SHAPES
        workloads = (REHEARSED, "decode1") if self.is_rehearsal else WORKLOADS
        small, common = shapes[0], workloads[0]
        tests = FILES[:1] if self.is_rehearsal else FILES
        found: dict[str, Callable[[], Result]] = {
            "ceilings": self.measure_ceilings,
            f"tests:{tests[0]}": partial(self.tests, tests[0], False),
            f"{small}:{common}": partial(self.throughput, small, common, ""),
        }
        if not self.is_rehearsal:
            found[f"{small}:{common}:transformers"] = partial(self.transformers, small, common)
        for batch in IDLE_BATCHES[:1] if self.is_rehearsal else IDLE_BATCHES:
            found[f"{small}:idle{batch}"] = partial(self.idle, small, batch)
        if not self.is_rehearsal:
            found[f"{small}:{common}:vllm"] = partial(self.vllm, small, common)
        found[f"{small}:{common}:invariant"] = partial(self.throughput, small, common, "invariant")
        # All workloads of a model together: only one model is kept. The large one has a target.
        for shape in sorted(shapes, key=lambda shape: shape != "llama-3.1-8b"):
            for workload in sorted(workloads, key=lambda workload: workload != "decode1"):
                found.setdefault(f"{shape}:{workload}", partial(self.throughput, shape, workload, ""))
        for workload in (common,) if self.is_rehearsal else (common, "decode1", "decode64"):
            for variant in ("invariant", "sampled", "eager"):
                part = partial(self.throughput, small, workload, variant)
                found.setdefault(f"{small}:{workload}:{variant}", part)
        for is_slow in (False,) if self.is_rehearsal else (False, True):
            for file in tests:
                name = f"tests:{file}:slow" if is_slow else f"tests:{file}"
                found.setdefault(name, partial(self.tests, file, is_slow))
        return {**found, "host": self.host, "compile": self.compile_report}

    def measure(self, name: str, part: Callable[[], Result]) -> Result:
        """Run a part and append its line to the results: what it found, or "failed" with the reason.

        What a command that failed had printed is appended to failures.txt.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ends_s = time.monotonic() + self.limit_s
        found: Result
        try:
            found = part()
        except subprocess.TimeoutExpired as error:
            self._keep(name, error.output)
            found = {"failed": f"it took longer than {self.limit_s:.0f} s"}
        except subprocess.CalledProcessError as error:
            self._keep(name, error.output)
            said = (error.output or "").strip().splitlines()
            found = {"failed": f"{error}{': ' if said else ''}{said[-1] if said else ''}"}
        except Exception as error:  # one part must not end the others
            found = {"failed": f"{type(error).__name__}: {error}"}
        append_result(self.results, {"part": name, "at": time.strftime("%Y-%m-%d %H:%M"), **found})
        return found

    def _keep(self, name: str, output: str | bytes | None) -> None:
        said = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
        with (self.folder / "failures.txt").open("a") as failures:
            failures.write(f"==== {name}\n{said}\n")

    def run(self, command: list[str], environment: dict[str, str] | None = None) -> str:
        """See `run`; stopped at the end of the part's time."""
        return run(command, min(self.limit_s, self.ends_s - time.monotonic()), environment)

    def throughput(self, shape: str, workload: str, variant: str) -> Result:
        """Run a workload on a model of random weights."""
        model = self.model(shape)
        arrivals = ["--arrivals"] if workload == "chat" else []
        path = self.workload(workload)
        command = [sys.executable, "-m", "pagoda", "bench", "throughput", "--json", "--warm-up",
                   "--workload", str(path), "--model", str(model), "--device", self.device, "--dtype", "bfloat16",
                   *(["--kv-cache-memory", "64MiB"] if self.is_rehearsal else []), *arrivals,
                   *VARIANTS[variant]]  # fmt: skip
        found = json.loads(self.run(command).splitlines()[-1])
        if "a3b" in shape:  # a step reads the weights of the experts that its tokens have chosen
            return found
        work, is_decode = json.loads(path.read_text()), workload.startswith("decode")
        return {**found, **shares_of_ceilings(found, work, ModelBytes.of(model), self.ceilings(), is_decode)}

    def ceilings(self) -> Result:
        """Return what the card has been measured to reach; empty if that part has not run."""
        results = (found for found in reversed(read_results(self.results)) if "failed" not in found)
        return next((found for found in results if found["part"] == "ceilings"), {})

    def measure_ceilings(self) -> Result:
        # In a process of its own, whose memory is free again for the parts that follow.
        return json.loads(self.run([sys.executable, "-m", "benchmarks.gpu_ceilings", "--device", self.device]))

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    def idle(self, shape: str, num_seqs: int) -> Result:
        steps = ["--warm", "5", "--steps", "10"] if self.is_rehearsal else []
        command = [sys.executable, "-m", "benchmarks.gpu_idle", str(self.model(shape)), "--device", self.device]
        return json.loads(self.run([*command, "--num-seqs", str(num_seqs), *steps]).splitlines()[-1])

    def compile_report(self) -> Result:
        only = ["--only", "norm"] if self.is_rehearsal else []
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        return {"report": self.run([sys.executable, "-m", "benchmarks.kernel_report", *only], environment)}

    def host(self) -> Result:
        steps = ["--steps", "20", "--rows", "1", "8"] if self.is_rehearsal else []
        lines = self.run([sys.executable, "-m", "benchmarks.host_step", *steps]).splitlines()
        return {"host": [json.loads(line) for line in lines]}

    def tests(self, file: str, is_slow: bool) -> Result:
        only = ["-k", "norms"] if self.is_rehearsal else []
        try:
            said = self.run([*command_of(file, self.device, is_slow), *only])
        except subprocess.CalledProcessError as error:
            if error.returncode != NO_TESTS:
                raise
            return {"tests": "none"}
        return {"tests": said.splitlines()[-1]}

    def model(self, shape: str) -> Path:
        """Return the folder of a checkpoint, made if it is not there. Only one is kept: the largest takes 60 GB."""
        model = self.folder / "models" / shape
        if not (model / "complete").exists():
            for other in (self.folder / "models").glob("*/*"):
                other.unlink()
            self.run([sys.executable, str(HERE / "make_random_model.py"), shape, str(model), "--device", self.device])
            (model / "complete").touch()
        return model

    def workload(self, name: str) -> Path:
        path = self.folder / f"{name}.json"
        if self.is_rehearsal:
            items = [{"id": f"{i}", "prompt_token_ids": list(range(9, 40)), "max_tokens": 8, "arrival_s": 0.0}
                     for i in range(1 if name == "decode1" else 4)]  # fmt: skip
            path.write_text(json.dumps(items))
        else:
            path.write_text(self.run([sys.executable, str(HERE / "workload.py"), name]))
        return path

    def transformers(self, shape: str, workload: str) -> Result:
        command = [sys.executable, str(HERE / "peers" / "transformers_continuous_peer.py")]
        return json.loads(self.run([*command, str(self.model(shape)), str(self.workload(workload))]).splitlines()[-1])

    def vllm(self, shape: str, workload: str) -> Result:
        look = "import importlib.util; print(importlib.util.find_spec('vllm') is not None)"
        if self.run([self.vllm_python, "-c", look]).strip() != "True":
            raise LookupError(f"{self.vllm_python} has no vLLM")
        command = [self.vllm_python, str(HERE / "peers" / "vllm_peer.py")]
        arguments = [str(self.model(shape)), str(self.workload(workload)), "--warm-up"]
        return json.loads(self.run([*command, *arguments]).splitlines()[-1])


def estimated_s(name: str) -> float:
    """Return about how long a part takes on a fast card, with the making of its model: a guess, for --budget."""
    kind = name.rpartition(":")[2]
    if name in ("ceilings", "host", "compile"):
        return {"ceilings": 30, "host": 60, "compile": 300}[name]
    if name.startswith("tests:"):
        return 150
    making = {"llama-3.1-8b": 40, "qwen3-30b-a3b": 150}.get(name.partition(":")[0], 30)
    working = 200 if kind in ("vllm", "transformers") else 120 if kind in ("nano256", "chat") else 60
    return min(LIMIT_S, making + working)


def run(command: list[str], timeout_s: float, environment: dict[str, str] | None = None) -> str:
    """Return a command's standard output.

    Raises CalledProcessError, and TimeoutExpired after timeout_s seconds. When it is stopped, so are the processes that
    it started: they would take memory and time of the parts that follow, and hold its output open.
    """
    process = subprocess.Popen(
        command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=max(0.0, timeout_s))
    except BaseException:  # an interrupt, too: processes in a session of their own do not receive it
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said)
    return said


def read_results(path: Path) -> list[Result]:
    """Return the results of earlier runs; a line that was cut off is left out."""
    found: list[Result] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def append_result(path: Path, result: Result) -> None:
    """Append a line, on a new line even if the last one was cut off."""
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_cut_off = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if is_cut_off else b"") + json.dumps(result).encode() + b"\n")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def exit_on_signals() -> None:
    """Make this process end as by an interrupt, with what it started, when it is terminated or its terminal closes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts, or all whose names begin so")
    parser.add_argument("--again", action="store_true", help="measure parts that have results too")
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "gpu")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="of the whole run")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON", help="a Python with vLLM")
    parser.add_argument("--rehearse", action="store_true", help="run everything small, on the CPU")
    given = parser.parse_args(arguments)
    ends_s = time.monotonic() + given.budget
    bench = Bench(given.folder / "rehearsal", "cpu") if given.rehearse else Bench(given.folder, "cuda")
    bench.vllm_python = given.vllm_python
    wanted = {name: part for name, part in bench.parts().items()
              if given.only is None or any(name.startswith(start) for start in given.only)}  # fmt: skip
    if not wanted:
        sys.exit(f"no part is called {' or '.join(given.only or ())}; --list prints their names")
    if given.list:
        print("\n".join(wanted))
        return
    unmeasured: dict[str, str] = {}  # part -> why
    if not given.rehearse and not has_gpu():
        unmeasured = {name: "torch sees no GPU here" for name in wanted if name not in WITHOUT_GPU}
        if len(unmeasured) == len(wanted):
            sys.exit(f"torch sees no GPU here; without one only {' and '.join(WITHOUT_GPU)} run, and --rehearse")
    results = read_results(bench.results)
    done = {found["part"] for found in results if "failed" not in found}
    tried = {found["part"] for found in results} - done
    num_failed = 0
    for name, part in sorted(wanted.items(), key=lambda item: item[0] in tried):
        if name in unmeasured:
            continue
        if name in done and not given.again:
            print(f"{name}: measured before (--again repeats it)")
            continue
        left_s = ends_s - time.monotonic()
        if left_s < estimated_s(name):
            unmeasured[name] = "the rest of --budget is too short"
            continue
        bench.limit_s = min(LIMIT_S, left_s)
        found = bench.measure(name, part)
        if "failed" in found:
            unmeasured[name] = str(found["failed"])
            num_failed += 1
        print(f"{name}: {found.get('report') or json.dumps(found)}", flush=True)
    if unmeasured:
        print("\nNot measured:")
        for reason in dict.fromkeys(unmeasured.values()):
            print(f"    {', '.join(name for name in unmeasured if unmeasured[name] == reason)}: {reason}")
    if num_failed:
        sys.exit(f"{num_failed} parts failed")


if __name__ == "__main__":
    exit_on_signals()
    main()
