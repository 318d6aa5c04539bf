#!/usr/bin/env python3
"""Measure the engine on a GPU, part by part. Needs no network: weights of real shapes are made on the spot.

    gpu.py [--only PART ...] [--again] [--folder build/gpu] [--list]

Each part takes less than 8 minutes and appends one JSON line to FOLDER/results.jsonl; parts that are there already are
left out, so an interrupted run continues. Without a GPU only `compile` runs. What the parts are:

    compile                 registers, spills and shared memory of all kernels, compiled for sm_80 and sm_90
    kernels                 the kernel tests, on the GPU
    ceilings                the memory bandwidth and the bfloat16 products per second that the card reaches
    SHAPE:WORKLOAD          output tokens per second, from `pagoda bench throughput`
    SHAPE:WORKLOAD:invariant    the same with --batch-invariant
    SHAPE:WORKLOAD:eager        the same with torch's kernels and without graphs
    SHAPE:WORKLOAD:transformers continuous batching of transformers, on the same card
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 470

SHAPES = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b")
WORKLOADS = ("nano256", "decode1", "decode8", "decode64", "decode256", "prefill8k", "prefix64", "chat")
VARIANTS = {
    "": [],
    "invariant": ["--batch-invariant"],
    "eager": ["--kernels", "torch"],
}


def parts() -> dict[str, Callable[[Path], dict[str, object]]]:
    """Every part by name, the most telling first."""
    found: dict[str, Callable[[Path], dict[str, object]]] = {
        "compile": lambda folder: compile_report(),
        "kernels": lambda folder: kernel_tests(),
        "ceilings": lambda folder: ceilings(),
    }
    for shape in SHAPES:
        for workload in WORKLOADS:
            found[f"{shape}:{workload}"] = _throughput(shape, workload, "")
    for workload in ("nano256", "decode1", "decode64"):
        for variant in ("invariant", "eager"):
            found[f"qwen3-0.6b:{workload}:{variant}"] = _throughput("qwen3-0.6b", workload, variant)
    found["qwen3-0.6b:nano256:transformers"] = lambda folder: transformers_peer(folder, "qwen3-0.6b", "nano256")
    return found


def _throughput(shape: str, workload: str, variant: str) -> Callable[[Path], dict[str, object]]:
    return lambda folder: throughput(folder, shape, workload, VARIANTS[variant])


def throughput(folder: Path, shape: str, workload: str, options: list[str]) -> dict[str, object]:
    """Run a workload on a model of random weights; with the bytes of its weights, for the share of the bandwidth."""
    model = model_of(folder, shape)
    arrivals = ["--arrivals"] if workload == "chat" else []
    command = [sys.executable, "-m", "pagoda", "bench", "throughput", "--json", "--workload",
               str(workload_of(folder, workload)), "--model", str(model), "--device", "cuda", "--dtype", "bfloat16",
               "--gpu-memory-utilization", "0.9", *arrivals, *options]  # fmt: skip
    found = json.loads(run(command).splitlines()[-1])
    return {**found, "weight_bytes": (model / "model.safetensors").stat().st_size}


def model_of(folder: Path, shape: str) -> Path:
    """Return the folder of a checkpoint, made if it is not there. Only one is kept: the largest takes 60 GB."""
    model = folder / "models" / shape
    if not (model / "complete").exists():
        for other in (folder / "models").glob("*/*"):
            other.unlink()
        run([sys.executable, str(HERE / "make_random_model.py"), shape, str(model)])
        (model / "complete").touch()
    return model


def workload_of(folder: Path, name: str) -> Path:
    path = folder / f"{name}.json"
    path.write_text(run([sys.executable, str(HERE / "workload.py"), name]))
    return path


def compile_report() -> dict[str, object]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return {"report": run([sys.executable, "-m", "benchmarks.kernel_report"], environment)}


def kernel_tests() -> dict[str, object]:
    said = run(
        [sys.executable, "-m", "pytest", "-q", "tests/kernels/test_triton.py", "tests/worker/test_gpu_memory.py"]
    )
    return {"tests": said.splitlines()[-1]}


def ceilings() -> dict[str, object]:
    """The best of several rounds: bytes read and written by a copy of 2 GiB, and products of 8,192 x 8,192 matrices."""
    import torch

    def seconds(call: Callable[[], object]) -> Iterator[float]:
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            yield time.perf_counter() - begin

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return {
        "device": torch.cuda.get_device_name(),
        "copy_bytes_per_s": 2 * source.numel() / min(seconds(lambda: target.copy_(source))),
        "bf16_flops_per_s": 2 * 8192**3 / min(seconds(lambda: a @ b)),
    }


def transformers_peer(folder: Path, shape: str, workload: str) -> dict[str, object]:
    command = [sys.executable, str(HERE / "peers" / "transformers_continuous_peer.py")]
    return json.loads(
        run([*command, str(model_of(folder, shape)), str(workload_of(folder, workload))]).splitlines()[-1]
    )


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Return a command's standard output. Raises CalledProcessError, or TimeoutExpired after LIMIT_S seconds."""
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts, or all whose names begin so")
    parser.add_argument("--again", action="store_true", help="measure parts that have results too")
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "gpu")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    given = parser.parse_args()
    wanted = {name: part for name, part in parts().items()
              if given.only is None or any(name.startswith(start) for start in given.only)}  # fmt: skip
    if not wanted:
        sys.exit(f"no part is called {' or '.join(given.only)}; --list prints their names")
    if given.list:
        print("\n".join(wanted))
        return
    if not has_gpu():
        wanted = {name: part for name, part in wanted.items() if name == "compile"}
        if not wanted:
            sys.exit("torch sees no GPU here; only the part `compile` runs without one")
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "results.jsonl"
    done = {json.loads(line)["part"] for line in results.read_text().splitlines()} if results.exists() else set()
    for name, part in wanted.items():
        if name in done and not given.again:
            print(f"{name}: measured before (--again repeats it)")
            continue
        try:
            found = part(given.folder)
        except (subprocess.SubprocessError, RuntimeError) as error:
            print(f"{name}: failed: {error}")
            continue
        with results.open("a") as file:
            file.write(json.dumps({"part": name, "at": time.strftime("%Y-%m-%d %H:%M"), **found}) + "\n")
        print(f"{name}: {found.get('report') or json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
