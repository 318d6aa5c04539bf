#!/usr/bin/env python3
"""How long the next turn of an agent's session takes after a restart: with blocks in files (`kv_tier`), and without.

usage: restart_turn.py [--model smollm2-135m] [--tokens 7500] [--turns 40] [--rounds 3]

A session of TURNS turns fills TOKENS tokens, in a process that is then killed. Then each round starts two engines, one
with the files and one without, asks for one token of the next turn after a short request that warms each up, and
prints the times and their ratio. The tokens must be equal.
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
from typing import Any


def turn(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000, 20_000) for _ in range(num_tokens)]


def engine(args: argparse.Namespace, folder: str | None) -> Any:
    from pagoda import LLM

    tier = {"kv_tier": f"disk={folder}:16GiB"} if folder else {}
    return LLM(args.model, max_num_seqs=4, kv_cache_memory="1GiB", **tier)


def ask(llm: Any, tokens: list[int], num_tokens: int) -> tuple[float, Any]:
    from pagoda import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    return time.perf_counter() - begin_s, output


def session(args: argparse.Namespace, folder: str) -> None:
    """Fill the session, print its tokens, and wait to be killed."""
    rng, tokens = random.Random(0), list[int]()
    llm = engine(args, folder)
    for _ in range(args.turns):
        tokens += turn(rng, args.tokens // args.turns - 8)
        tokens += ask(llm, tokens, 8)[1].outputs[0].token_ids
    time.sleep(2)
    print(json.dumps(tokens), flush=True)
    time.sleep(600)


def next_turn(args: argparse.Namespace, folder: str | None) -> None:
    """Print the seconds to the first token of the next turn, that token, and how many of its tokens were cached."""
    tokens = json.loads(sys.stdin.read())
    llm = engine(args, folder)
    ask(llm, turn(random.Random(1), 300), 4)
    seconds, output = ask(llm, tokens + turn(random.Random(2), 60), 1)
    print(json.dumps([seconds, output.outputs[0].token_ids, output.num_cached_tokens]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        session(args, args.folder) if args.part == "session" else next_turn(args, args.folder)
        return
    again = [sys.executable, __file__, *sys.argv[1:], "--part"]
    with tempfile.TemporaryDirectory() as folder:
        first = subprocess.Popen([*again, "session", "--folder", folder], stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        tokens = first.stdout.readline()
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        ratios: list[float] = []
        for _ in range(args.rounds):
            found: list[list[Any]] = []
            for more in (["--folder", folder], []):
                command = [*again, "next", *more]
                done = subprocess.run(command, input=tokens, stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
            (with_s, token, num_cached), (without_s, other, _) = found
            assert token == other, "the tokens must be equal"
            ratios.append(without_s / with_s)
            print(f"{len(json.loads(tokens)) + 60} tokens, {num_cached} cached: {with_s:.2f} s with files,")
            print(f"  {without_s:.2f} s without: {ratios[-1]:.1f} times", flush=True)
    print(f"median: {statistics.median(ratios):.1f} times")


if __name__ == "__main__":
    main()
