#!/usr/bin/env python3
"""Measure the engine on a GPU, part by part. Needs no network: weights of real shapes are made on the spot.

    gpu.py [--only PART ...] [--again] [--folder build/gpu] [--list] [--rehearse]

Each part takes less than 8 minutes, or is stopped, and appends one JSON line to FOLDER/results.jsonl; parts that are
there already are left out, so an interrupted run continues. A part that failed has a line with "failed" and the reason;
the next run tries it again. Without a GPU only `compile` and `host` run. What the parts are:

    compile                 registers, spills and shared memory of all kernels, compiled for sm_80 and sm_90
    host                    what a step costs the host, with a device that computes nothing
    kernels:FILE            the tests of numbers, on the GPU
    ceilings                the memory bandwidth and the bfloat16 products per second that the card reaches
    SHAPE:WORKLOAD          output tokens per second, from `pagoda bench throughput`; with the shares of the ceilings
    SHAPE:idleN             share of the time without a kernel running, while N sequences decode
    SHAPE:WORKLOAD:invariant    the same with --batch-invariant
    SHAPE:WORKLOAD:eager        the same with torch's kernels and without graphs
    SHAPE:WORKLOAD:flashinfer, :varlen    the same with --attention-backend, where the library is installed
    SHAPE:WORKLOAD:transformers continuous batching of transformers, on the same card

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 470
WITHOUT_GPU = ("compile", "host")

SHAPES = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b")
WORKLOADS = ("nano256", "decode1", "decode8", "decode64", "decode256", "prefill8k", "prefix64", "chat")
KERNEL_TESTS = ("tests/kernels/test_triton.py", "tests/kernels/test_triton_linear.py",
                "tests/kernels/test_shared_prefix.py", "tests/kernels/test_ops.py", "tests/kernels/test_attention.py",
                "tests/kernels/test_bidirectional.py", "tests/kernels/test_device_blocks.py",
                "tests/kernels/test_sampling.py", "tests/kernels/test_constraints.py", "tests/kernels/test_moe.py",
                "tests/kernels/test_low_rank.py", "tests/kernels/test_linear.py", "tests/kernels/test_int4_products.py",
                "tests/worker/test_gpu_memory.py", "tests/engine/test_batch_invariance.py")  # fmt: skip
IDLE_BATCHES = (1, 64, 256)
VARIANTS = {
    "": [],
    "invariant": ["--batch-invariant"],
    "eager": ["--kernels", "torch"],
    "flashinfer": ["--attention-backend", "flashinfer"],
    "varlen": ["--attention-backend", "varlen"],
}
REHEARSED = "tiny"

Result = dict[str, object]


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

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"

    def parts(self) -> dict[str, Callable[[], Result]]:
        """Return every part by name, the most telling first."""
        shapes = (REHEARSED,) if self.is_rehearsal else SHAPES
        workloads = (REHEARSED, "decode1") if self.is_rehearsal else WORKLOADS
        small, common = shapes[0], workloads[0]
        found: dict[str, Callable[[], Result]] = {
            "compile": self.compile_report,
            "host": self.host,
            "ceilings": self.measure_ceilings,
        }
        for path in KERNEL_TESTS[:1] if self.is_rehearsal else KERNEL_TESTS:
            found[f"kernels:{Path(path).stem}"] = partial(self.kernel_tests, path)
        for shape in shapes:
            for workload in workloads:
                found[f"{shape}:{workload}"] = partial(self.throughput, shape, workload, "")
        for batch in IDLE_BATCHES[:1] if self.is_rehearsal else IDLE_BATCHES:
            found[f"{small}:idle{batch}"] = partial(self.idle, small, batch)
        for workload in (common,) if self.is_rehearsal else (common, "decode1", "decode64"):
            for variant in ("invariant", "eager"):
                found[f"{small}:{workload}:{variant}"] = partial(self.throughput, small, workload, variant)
        if not self.is_rehearsal:
            for workload in (common, "decode64", "prefill8k"):
                for variant in ("flashinfer", "varlen"):
                    found[f"{small}:{workload}:{variant}"] = partial(self.throughput, small, workload, variant)
            found[f"{small}:{common}:transformers"] = partial(self.transformers, small, common)
        return found

    def measure(self, name: str, part: Callable[[], Result]) -> Result:
        """Run a part and append its line to the results: what it found, or "failed" with the reason."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ends_s = time.monotonic() + self.limit_s
        found: Result
        try:
            found = part()
        except subprocess.TimeoutExpired:
            found = {"failed": f"it took longer than {self.limit_s:.0f} s"}
        except subprocess.CalledProcessError as error:
            said = (error.output or "").strip().splitlines()
            found = {"failed": f"{error}{': ' if said else ''}{said[-1] if said else ''}"}
        except Exception as error:  # one part must not end the others
            found = {"failed": f"{type(error).__name__}: {error}"}
        append_result(self.results, {"part": name, "at": time.strftime("%Y-%m-%d %H:%M"), **found})
        return found

    def run(self, command: list[str], environment: dict[str, str] | None = None) -> str:
        """See `run`; stopped at the end of the part's time."""
        return run(command, min(self.limit_s, self.ends_s - time.monotonic()), environment)

    def throughput(self, shape: str, workload: str, variant: str) -> Result:
        """Run a workload on a model of random weights."""
        model = self.model(shape)
        arrivals = ["--arrivals"] if workload == "chat" else []
        command = [sys.executable, "-m", "pagoda", "bench", "throughput", "--json", "--workload",
                   str(self.workload(workload)), "--model", str(model), "--device", self.device, "--dtype", "bfloat16",
                   *(["--kv-cache-memory", "64MiB"] if self.is_rehearsal else []), *arrivals,
                   *VARIANTS[variant]]  # fmt: skip
        found = json.loads(self.run(command).splitlines()[-1])
        weight_bytes = (model / "model.safetensors").stat().st_size
        shares = shares_of_ceilings(found, workload, weight_bytes, self.ceilings()) if "a3b" not in shape else {}
        return {**found, "weight_bytes": weight_bytes, **shares}

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

    def kernel_tests(self, path: str) -> Result:
        only = ["-k", "norms"] if self.is_rehearsal else []
        said = self.run([sys.executable, "-m", "pytest", "-q", "--device", self.device, path, *only])
        return {"tests": said.splitlines()[-1]}

    def model(self, shape: str) -> Path:
        """Return the folder of a checkpoint, made if it is not there. Only one is kept: the largest takes 60 GB."""
        model = self.folder / "models" / shape
        if not (model / "complete").exists():
            for other in (self.folder / "models").glob("*/*"):
                other.unlink()
            self.run([sys.executable, str(HERE / "make_random_model.py"), shape, str(model)])
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


def shares_of_ceilings(
    found: Mapping[str, object], workload: str, weight_bytes: int, ceilings: Mapping[str, object]
) -> Result:
    """Return the shares of the card's bandwidth and products that a dense bfloat16 model's throughput takes.

    Of the bandwidth, for the decode workloads: all weights are read once per step. The KV cache is left out, so the
    share is at least this. Of the products: two per weight and token, prompts included, without attention.
    """
    if not ceilings:
        return {}
    tokens = int(str(found["in"])) + int(str(found["out"]))
    flops = weight_bytes * tokens / float(str(found["secs"]))  # two products per weight, two bytes per weight
    shares: Result = {"share_of_flops": flops / float(str(ceilings["bf16_flops_per_s"]))}
    if workload.startswith("decode"):
        steps_per_s = float(str(found["out_tok_s"])) / int(workload.removeprefix("decode"))
        shares["share_of_bandwidth"] = weight_bytes * steps_per_s / float(str(ceilings["copy_bytes_per_s"]))
    return shares


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
    parser.add_argument("--rehearse", action="store_true", help="run everything small, on the CPU")
    given = parser.parse_args(arguments)
    bench = Bench(given.folder / "rehearsal", "cpu") if given.rehearse else Bench(given.folder, "cuda")
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
    done = {found["part"] for found in read_results(bench.results) if "failed" not in found}
    num_failed = 0
    for name, part in wanted.items():
        if name in unmeasured:
            continue
        if name in done and not given.again:
            print(f"{name}: measured before (--again repeats it)")
            continue
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
