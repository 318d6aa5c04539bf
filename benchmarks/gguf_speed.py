#!/usr/bin/env python3
"""GGUF files in pagoda next to llama.cpp: decode, prefill and 16 streams, in alternating rounds.

usage: gguf_speed.py LLAMA_BIN_FOLDER NAME=FILE.gguf ... [--rounds 7] [--measures decode] [--drift 0.05] [--json]

LLAMA_BIN_FOLDER: with llama-bench and llama-server, built for this machine.   In each round both engines compute, one
after the other and with the same threads: 64 tokens of one stream after a prompt of 16 (llama-bench: 64 tokens from
nothing), a prompt of 512, and 16 requests at once of 64 tokens in and 32 out (llama-server with 16 slots). Memory reads
are measured before, between and after them: a round in which they changed by more than --drift is left out and counted.
`share` is how much of the bandwidth of its round pagoda's decoding used: bytes of the weights that a token reads, and
of recurrent states, which it reads and writes, times tokens per second.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compare import circumstances, read_bandwidth_gb_s
from peers.llama_server import LlamaServer

DECODED, PROMPT, STREAMS, STREAM_PROMPT, STREAM_OUT = 64, 512, 16, 64, 32
MEASURES = ("decode", "prefill", "streams")


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other seed gives, below 40,000."""
    return [(seed * 7919 + place * 104_729) % 39_000 + 300 for place in range(length)]


def measure_pagoda(path: str, measures: Sequence[str]) -> dict[str, float]:
    """Tokens per second, in this process."""
    from pagoda import LLM, SamplingParams

    def params(length: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)

    with LLM(path, max_model_len=1024, max_num_seqs=STREAMS, enable_prefix_caching=False) as llm:
        llm.generate([prompt(32, 1)], params(8), use_tqdm=False)
        found: dict[str, float] = {}
        times: list[float] = []
        for _ in llm.stream(prompt(16, 2), params(DECODED + 1)):
            times.append(time.perf_counter())
        found["decode"] = DECODED / (times[-1] - times[0])
        if "prefill" in measures:
            begin_s = time.perf_counter()
            llm.generate([prompt(PROMPT, 3)], params(1), use_tqdm=False)
            found["prefill"] = PROMPT / (time.perf_counter() - begin_s)
        if "streams" in measures:
            many = [prompt(STREAM_PROMPT, 4 + number) for number in range(STREAMS)]
            begin_s = time.perf_counter()
            llm.generate(many, params(STREAM_OUT), use_tqdm=False)
            found["streams"] = STREAMS * STREAM_OUT / (time.perf_counter() - begin_s)
    return found


def in_own_process(path: str, measures: Sequence[str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--measure", path, *measures], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pagoda with {path} failed: {done.stderr[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_llama(folder: Path, path: str, measures: Sequence[str]) -> dict[str, float]:
    length = str(PROMPT if "prefill" in measures else 0)
    command = [folder / "llama-bench", "-m", path, "-p", length, "-n", str(DECODED), "-r", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"llama-bench with {path} failed: {done.stderr[-600:]}")
    rows = json.loads(done.stdout)
    found = {"prefill" if row["n_gen"] == 0 else "decode": float(row["avg_ts"]) for row in rows}
    if "streams" not in measures:
        return found
    with LlamaServer(str(folder / "llama-server"), path, STREAMS, STREAM_PROMPT + STREAM_OUT) as server:
        server.complete(prompt(30, 1), 8)
        begin_s = time.perf_counter()
        num_out = server.complete_all([(prompt(STREAM_PROMPT, 4 + one), STREAM_OUT) for one in range(STREAMS)])
        found["streams"] = num_out / (time.perf_counter() - begin_s)
    return found


def bytes_per_token(path: str) -> int:
    """Return the bytes that a token reads and writes: of an embedding that is not the head, that is one row."""
    from pagoda.loading.gguf_file import open_gguf

    file = open_gguf(Path(path))
    unread = {"token_embd.weight"} if "output.weight" in file.tensors else set[str]()
    weights = sum(tensor.num_bytes for name, tensor in file.tensors.items() if name not in unread)
    num_recurrent = sum(name.endswith(".ssm_a") for name in file.tensors)
    if not num_recurrent:
        return weights
    arch = file.require("general.architecture", str)
    state = 4 * file.require(f"{arch}.ssm.inner_size", int) * file.require(f"{arch}.ssm.state_size", int)
    return weights + 2 * num_recurrent * state


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure_pagoda(sys.argv[2], sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="LLAMA_BIN_FOLDER")
    parser.add_argument("files", nargs="+", metavar="NAME=FILE.gguf")
    parser.add_argument("--rounds", type=int, default=7, help="that count; up to twice as many are run")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES), help="decode is always one")
    parser.add_argument("--drift", type=float, default=0.05, help="how far memory reads may change in a round")
    parser.add_argument("--json", action="store_true", help="one JSON line for each file")
    given = parser.parse_args()
    measures = [name for name in MEASURES if name in ("decode", *given.measures)]
    for name, path in (item.split("=", 1) for item in given.files):
        num_bytes, rounds, left_out = bytes_per_token(path), list[dict[str, float]](), 0
        while len(rounds) < given.rounds and len(rounds) + left_out < 2 * given.rounds:
            speeds = [read_bandwidth_gb_s()]
            own = in_own_process(path, measures)
            speeds.append(read_bandwidth_gb_s())
            peer = measure_llama(given.folder, path, measures)
            speeds.append(read_bandwidth_gb_s())
            line = {
                f"{measure} {engine}": round(figures[measure], 1)
                for measure in measures
                for engine, figures in (("pagoda", own), ("llama.cpp", peer))
            }
            line |= {measure: own[measure] / peer[measure] for measure in measures}
            line |= {"bandwidth": min(speeds[:2]), "share": num_bytes * own["decode"] / 1e9 / max(speeds[:2])}
            drifted = max(speeds) / min(speeds) - 1 > given.drift
            shown = ", ".join(f"{measure} {line[measure]:.2f}" for measure in measures)
            reads = " ".join(f"{speed:.1f}" for speed in speeds)
            print(f"{name}: {shown}; reads {reads} GB/s{' (left out)' if drifted else ''}", file=sys.stderr)
            left_out += drifted
            if not drifted:
                rounds.append(line)
        if not rounds:
            print(f"{name}: no round in which memory reads changed by at most {given.drift:.0%}, of {left_out}")
            continue
        row: dict[str, object] = {"file": name, "rounds": len(rounds), "left_out": left_out, "drift": given.drift}
        row |= {key: round(statistics.median(one[key] for one in rounds), 2) for key in rounds[0]}
        row["decode_ratios"] = [round(one["decode"], 2) for one in rounds]
        if given.json:
            print(json.dumps({**row, **circumstances()}))
        else:
            print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
