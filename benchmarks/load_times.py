#!/usr/bin/env python3
"""How long a model takes from the command to its first token, next to `import torch` of the same round.

usage: load_times.py [NAME=MODEL ...] [--rounds 5] [--backed GIB] [--peer LLAMA_SERVER] [--json]

MODEL: anything that --model takes; without one, the default model. Each round runs `import torch` and then every
model once, in a process of its own: from `pagoda generate "Say hi" --model MODEL --max-tokens 1` to the first byte of
its answer: once packing the weights, and once with those that an earlier start has kept in a file (`_kept`; small
models have none). Files are read once before, so they are in the page cache, and that of packed weights is written.
Afterwards each model is loaded once more either way to read how much anonymous memory it takes while it loads and when
it has answered. With --peer, llama-server loads the
same files: from its start until it is ready, and until it has answered with one token. Make files of a size with
make_random_gguf.py; the first run on a machine compiles the kernels and is not counted.

In a virtual machine, memory that no program has used for a while may have to come from the host at its first use,
which can take 30 times as long as using it again. With --backed, a process writes and frees so much memory before each
start.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from compare import circumstances, machine, read_bandwidth_gb_s
from peers.llama_server import LlamaServer

PROMPT = "Say hi"


def pagoda(model: str, tokens: int = 1) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pagoda",
        "generate",
        PROMPT,
        "--model",
        model,
        "--max-tokens",
        str(tokens),
        "--temperature",
        "0",
    ]


def environment(kept: bool) -> dict[str, str]:
    """kept: whether weights that were packed before are mapped."""
    return {**os.environ, **({} if kept else {"PAGODA_PACKED_CACHE_SIZE": "0"})}


def first_token_s(model: str, kept: bool) -> float:
    """Seconds from the start of the command to the first byte of its answer."""
    begin_s = time.perf_counter()
    with subprocess.Popen(
        pagoda(model), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(kept)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = os.read(process.stdout.fileno(), 1)
        took_s = time.perf_counter() - begin_s
        error = process.communicate()[1].decode()
    if not first or process.returncode:
        sys.exit(f"pagoda with {model} failed: {error[-600:]}")
    return took_s


def import_torch_s() -> float:
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin_s


def anonymous_mib(model: str, kept: bool) -> tuple[float, float]:
    """Return the largest anonymous memory of a run while it loads, and that of when it answers, in MiB."""
    most = last = 0
    with subprocess.Popen(
        pagoda(model, 16), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(kept)
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        while process.stdout.read(1) is None:  # None: nothing yet
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
            last = int(found[1]) if found else last
            most = max(most, last)
            time.sleep(0.002)
        process.communicate()
    return most / 1024, last / 1024


def take_memory(gib: float) -> None:
    """Write that much memory in a process, which then frees it."""
    subprocess.run([sys.executable, "-c", f"b'1' * {round(gib * 2**30)}"], check=True)


def read_files(model: str) -> None:
    """Bring a model's files into the page cache."""
    path = Path(model)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as source:
                while source.read(1 << 24):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL", default=["default=smollm2-135m"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--backed", type=float, default=0.0, metavar="GIB", help="memory to take and free before a start"
    )
    parser.add_argument("--peer", metavar="LLAMA_SERVER", help="the program to compare with, for .gguf files")
    parser.add_argument("--json", action="store_true", help="one JSON line for each model")
    given = parser.parse_args()
    models = dict(item.split("=", 1) for item in given.models)
    torch_s: list[float] = []
    own: dict[str, list[float]] = {name: [] for name in models}
    own_kept: dict[str, list[float]] = {name: [] for name in models}
    peer: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for model in models.values():
        read_files(model)
        first_token_s(model, kept=True)
    before = read_bandwidth_gb_s()
    for number in range(given.rounds):
        torch_s.append(import_torch_s())
        for name, model in models.items():
            for kept, took in ((False, own), (True, own_kept)):
                if given.backed:
                    take_memory(given.backed)
                took[name].append(first_token_s(model, kept))
            if given.peer and model.endswith(".gguf"):
                with LlamaServer(given.peer, model) as server:
                    server.complete(PROMPT, 1)
                    peer[name].append((server.ready_s, time.perf_counter() - server.begin_s))
            packed_s, kept_s = own[name][-1], own_kept[name][-1]
            times = f"{name} {packed_s:.2f} s, kept {kept_s:.2f} s, torch {torch_s[-1]:.2f} s"
            print(f"round {number + 1}: {times}", file=sys.stderr)
    after = read_bandwidth_gb_s()
    if not given.json:
        print(
            f"{machine()}; memory reads {before:.1f} and {after:.1f} GB/s; medians of {given.rounds}; import torch "
            f"{statistics.median(torch_s):.2f} s"
        )
    for name, model in models.items():
        over, over_kept = (
            [took - torch for took, torch in zip(of[name], torch_s, strict=True)] for of in (own, own_kept)
        )
        ratios = [packed / kept for packed, kept in zip(own[name], own_kept[name], strict=True)]
        most, final = anonymous_mib(model, kept=False)
        most_kept, final_kept = anonymous_mib(model, kept=True)
        row: dict[str, object] = {
            "model": name,
            "import_torch_s": round(statistics.median(torch_s), 2),
            "first_token_s": round(statistics.median(own[name]), 2),
            "over_torch_s": round(statistics.median(over), 2),
            "over_torch_range_s": [round(min(over), 2), round(max(over), 2)],
            "over_torch_kept_s": round(statistics.median(over_kept), 2),
            "over_torch_range_kept_s": [round(min(over_kept), 2), round(max(over_kept), 2)],
            "packed_to_kept": [round(ratio, 2) for ratio in ratios],
            "anonymous_peak_mib": round(most),
            "anonymous_final_mib": round(final),
            "peak_ratio": round(most / final, 3),
            "anonymous_peak_kept_mib": round(most_kept),
            "anonymous_final_kept_mib": round(final_kept),
        }
        if peer[name]:
            ready, answered = (statistics.median(one) for one in zip(*peer[name], strict=True))
            row |= {"llama_server_ready_s": round(ready, 2), "llama_server_first_token_s": round(answered, 2)}
        if given.json:
            print(json.dumps({**row, "backed_gib": given.backed, **circumstances()}))
        else:
            print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
