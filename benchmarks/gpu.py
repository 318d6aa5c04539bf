#!/usr/bin/env python3
"""Measure the engine on a GPU, part by part. Needs no network: weights of real shapes are made on the spot.

    gpu.py [--only PART ...] [--again] [--folder build/gpu] [--list] [--rehearse]

Each part takes less than 8 minutes and appends one JSON line to FOLDER/results.jsonl; parts that are there already are
left out, so an interrupted run continues. Without a GPU only `compile` and `host` run. What the parts are:

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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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
                "tests/kernels/test_sampling.py", "tests/kernels/test_constraints.py", "tests/kernels/test_moe.py",
                "tests/kernels/test_low_rank.py", "tests/kernels/test_linear.py", "tests/worker/test_gpu_memory.py",
                "tests/engine/test_batch_invariance.py")  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things are measured.   device: "cuda", or "cpu" for a rehearsal."""

    folder: Path
    device: str

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"

    def parts(self) -> dict[str, Callable[[], Result]]:
        """Return every part by name, the most telling first."""
        shapes = (REHEARSED,) if self.is_rehearsal else SHAPES
        workloads = (REHEARSED, "decode1") if self.is_rehearsal else WORKLOADS
        small, common = shapes[0], workloads[0]
        found: dict[str, Callable[[], Result]] = {
            "compile": partial(compile_report, ["--only", "norm"] if self.is_rehearsal else []),
            "host": partial(self.host),
            "ceilings": partial(ceilings, self.device),
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

    def throughput(self, shape: str, workload: str, variant: str) -> Result:
        """Run a workload on a model of random weights."""
        model = self.model(shape)
        arrivals = ["--arrivals"] if workload == "chat" else []
        command = [sys.executable, "-m", "pagoda", "bench", "throughput", "--json", "--workload",
                   str(self.workload(workload)), "--model", str(model), "--device", self.device, "--dtype", "bfloat16",
                   *(["--kv-cache-memory", "64MiB"] if self.is_rehearsal else []), *arrivals,
                   *VARIANTS[variant]]  # fmt: skip
        found = json.loads(run(command).splitlines()[-1])
        weight_bytes = (model / "model.safetensors").stat().st_size
        shares = shares_of_ceilings(found, workload, weight_bytes, self.ceilings()) if "a3b" not in shape else {}
        return {**found, "weight_bytes": weight_bytes, **shares}

    def ceilings(self) -> Result:
        """Return what the card has been measured to reach; empty if that part has not run."""
        return next((found for found in reversed(read_results(self.results)) if found["part"] == "ceilings"), {})

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    def idle(self, shape: str, num_seqs: int) -> Result:
        steps = ["--warm", "5", "--steps", "10"] if self.is_rehearsal else []
        command = [sys.executable, "-m", "benchmarks.gpu_idle", str(self.model(shape)), "--device", self.device]
        return json.loads(run([*command, "--num-seqs", str(num_seqs), *steps]).splitlines()[-1])

    def host(self) -> Result:
        steps = ["--steps", "20", "--rows", "1", "8"] if self.is_rehearsal else []
        lines = run([sys.executable, "-m", "benchmarks.host_step", *steps]).splitlines()
        return {"host": [json.loads(line) for line in lines]}

    def kernel_tests(self, path: str) -> Result:
        only = ["-k", "norms"] if self.is_rehearsal else []
        said = run([sys.executable, "-m", "pytest", "-q", "--device", self.device, path, *only])
        return {"tests": said.splitlines()[-1]}

    def model(self, shape: str) -> Path:
        """Return the folder of a checkpoint, made if it is not there. Only one is kept: the largest takes 60 GB."""
        model = self.folder / "models" / shape
        if not (model / "complete").exists():
            for other in (self.folder / "models").glob("*/*"):
                other.unlink()
            run([sys.executable, str(HERE / "make_random_model.py"), shape, str(model)])
            (model / "complete").touch()
        return model

    def workload(self, name: str) -> Path:
        path = self.folder / f"{name}.json"
        if self.is_rehearsal:
            items = [{"id": f"{i}", "prompt_token_ids": list(range(9, 40)), "max_tokens": 8, "arrival_s": 0.0}
                     for i in range(1 if name == "decode1" else 4)]  # fmt: skip
            path.write_text(json.dumps(items))
        else:
            path.write_text(run([sys.executable, str(HERE / "workload.py"), name]))
        return path

    def transformers(self, shape: str, workload: str) -> Result:
        command = [sys.executable, str(HERE / "peers" / "transformers_continuous_peer.py")]
        return json.loads(run([*command, str(self.model(shape)), str(self.workload(workload))]).splitlines()[-1])


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


def compile_report(only: list[str]) -> Result:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return {"report": run([sys.executable, "-m", "benchmarks.kernel_report", *only], environment)}


def ceilings(device: str) -> Result:
    """The best of several rounds: bytes read and written by a copy of 2 GiB, and products of 8,192 x 8,192 matrices."""
    import torch

    num_bytes, size = (2**31, 8192) if device == "cuda" else (2**20, 64)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def seconds(call: Callable[[], object]) -> Iterator[float]:
        for _ in range(10):
            wait()
            begin = time.perf_counter()
            call()
            wait()
            yield time.perf_counter() - begin

    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "copy_bytes_per_s": 2 * source.numel() / min(seconds(lambda: target.copy_(source))),
        "bf16_flops_per_s": 2 * size**3 / min(seconds(lambda: a @ b)),
    }


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Return a command's standard output. Raises CalledProcessError, or TimeoutExpired after LIMIT_S seconds."""
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout


def read_results(path: Path) -> list[Result]:
    """Return the results of earlier runs; a line that was cut off is left out."""
    found: list[Result] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts, or all whose names begin so")
    parser.add_argument("--again", action="store_true", help="measure parts that have results too")
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "gpu")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--rehearse", action="store_true", help="run everything small, on the CPU")
    given = parser.parse_args()
    bench = Bench(given.folder / "rehearsal", "cpu") if given.rehearse else Bench(given.folder, "cuda")
    wanted = {name: part for name, part in bench.parts().items()
              if given.only is None or any(name.startswith(start) for start in given.only)}  # fmt: skip
    if not wanted:
        sys.exit(f"no part is called {' or '.join(given.only or ())}; --list prints their names")
    if given.list:
        print("\n".join(wanted))
        return
    if not given.rehearse and not has_gpu():
        wanted = {name: part for name, part in wanted.items() if name in WITHOUT_GPU}
        if not wanted:
            sys.exit(f"torch sees no GPU here; without one only {' and '.join(WITHOUT_GPU)} run, and --rehearse")
    bench.folder.mkdir(parents=True, exist_ok=True)
    done = {found["part"] for found in read_results(bench.results)}
    num_failed = 0
    for name, part in wanted.items():
        if name in done and not given.again:
            print(f"{name}: measured before (--again repeats it)")
            continue
        try:
            found = part()
        except (subprocess.SubprocessError, RuntimeError) as error:
            print(f"{name}: failed: {error}")
            num_failed += 1
            continue
        with bench.results.open("a") as file:
            file.write(json.dumps({"part": name, "at": time.strftime("%Y-%m-%d %H:%M"), **found}) + "\n")
        print(f"{name}: {found.get('report') or json.dumps(found)}", flush=True)
    if num_failed:
        sys.exit(f"{num_failed} parts failed")


if __name__ == "__main__":
    main()
