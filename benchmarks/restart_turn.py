#!/usr/bin/env python3
"""How long turns of an agent's session take after a restart: with blocks in files (`kv_tier`), and without.

usage: python -m benchmarks.restart_turn [--model MODEL] [--tokens 30000] [--turns 40] [--rounds 3] [--host SIZE]

A session of TURNS turns has TOKENS tokens in the end. All but the last ROUNDS run in one process, which is killed. Then
each round is the next turn, in two processes, one with the files and one without: an engine starts, a short request
warms it up, and the time to the first token of the turn's answer is taken. The tokens must be equal. The process with
files ends as a server does, so that the next round finds this turn, too.

Without --model, it is one with random weights and 6 layers of SmolLM2-135M's sizes, and room for the session: what is
computed and what is read both grow with the layers.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.make_random_model import SHAPES, make

ANSWER = 8


def asked(args: argparse.Namespace, number: int) -> list[int]:
    """Return what is added in a turn, such as what a tool has returned."""
    rng = random.Random(number)
    return [rng.randrange(1000, 20_000) for _ in range(args.tokens // args.turns - ANSWER)]


def engine(args: argparse.Namespace) -> Any:
    from pagoda import LLM

    host = f"host={args.host}," if args.host else ""
    tier = {"kv_tier": f"{host}disk={args.folder}:16GiB"} if args.folder else {}
    return LLM(args.model, max_num_seqs=4, max_model_len=args.tokens + 1024, kv_cache_memory="1GiB", **tier)


def ask(llm: Any, tokens: list[int], num_tokens: int) -> tuple[float, Any]:
    from pagoda import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    return time.perf_counter() - begin_s, output


def session(args: argparse.Namespace) -> None:
    """Run the turns before the rounds, print all tokens, and wait to be killed."""
    tokens, llm = list[int](), engine(args)
    for number in range(args.turns - args.rounds):
        tokens += asked(args, number)
        tokens += ask(llm, tokens, ANSWER)[1].outputs[0].token_ids
    time.sleep(2)
    print(json.dumps(tokens), flush=True)
    time.sleep(600)


def next_turn(args: argparse.Namespace) -> None:
    """Read the tokens up to the turn's answer; print the seconds to its first token, it, and how many were cached."""
    tokens = json.loads(sys.stdin.read())
    with engine(args) as llm:
        ask(llm, asked(args, -1)[:300], 4)
        seconds, first = ask(llm, tokens, 1)
        _, output = ask(llm, tokens, ANSWER)
        assert output.outputs[0].token_ids[0] == first.outputs[0].token_ids[0]
    print(json.dumps([seconds, list(output.outputs[0].token_ids), first.num_cached_tokens]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host", help="keep blocks in memory, too: at most so many bytes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        session(args) if args.part == "session" else next_turn(args)
        return
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make(
                replace(SHAPES["smollm2-135m"], num_hidden_layers=6, max_position_embeddings=args.tokens + 1024),
                Path(made),
            )
        model = ["--model", args.model or made]
        again = [sys.executable, "-m", "benchmarks.restart_turn", *sys.argv[1:], *model, "--part"]
        first = subprocess.Popen([*again, "session", "--folder", folder], stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        tokens = json.loads(first.stdout.readline())
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        ratios: list[float] = []
        for number in range(args.turns - args.rounds, args.turns):
            tokens += asked(args, number)
            found: list[list[Any]] = []
            for more in (["--folder", folder], []):
                command = [*again, "next", *more]
                done = subprocess.run(command, input=json.dumps(tokens), stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
            (with_s, answer, num_cached), (without_s, other, _) = found
            assert answer == other, "the tokens must be equal"
            ratios.append(without_s / with_s)
            print(f"turn {number + 1}: {len(tokens)} tokens, {num_cached} cached: {with_s:.2f} s with files,")
            print(f"  {without_s:.2f} s without: {ratios[-1]:.1f} times", flush=True)
            tokens += answer
        records = [one.stat().st_size for one in Path(folder).glob("*/??/*") if one.is_file()]
        print(f"{len(records)} files, {sum(records) >> 20} MiB")
    print(f"median: {statistics.median(ratios):.1f} times")


if __name__ == "__main__":
    main()
