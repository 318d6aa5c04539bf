#!/usr/bin/env python3
"""Write a benchmark workload as JSON: the same bytes for every engine that is compared.

usage: workload.py NAME [--seed 0] [--vocab 49000] > NAME.json

A workload is a list of {"id", "prompt_token_ids", "max_tokens", "arrival_s"}. Prompts are random token ids; outputs are
to have exactly max_tokens tokens (engines ignore the end-of-text token), so every engine does the same work.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_TOKEN = 10  # ids below tend to be special


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(slots=True)
class Draw:
    """Random numbers of one workload. The order of the calls is part of what a workload is."""

    vocab: int
    rng: random.Random = field(default_factory=random.Random)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(FIRST_TOKEN, self.vocab) for _ in range(count)]

    def length(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def log_normal(self, mean: float, deviation: float, low: int, high: int) -> int:
        return max(low, min(high, int(self.rng.lognormvariate(mean, deviation))))


def offline(draw: Draw, count: int) -> list[Row]:
    """Prompts of 64 to 512 tokens, outputs of 64 to 256, all there at once: throughput."""
    return [Row(draw.tokens(draw.length(64, 512)), draw.length(64, 256)) for _ in range(count)]


def single(draw: Draw) -> list[Row]:
    """One request, 32 in and 256 out: the speed one user sees."""
    return [Row(draw.tokens(32), 256)]


def shared_prefix(draw: Draw) -> list[Row]:
    """64 requests with the same first 1,024 tokens and 32 of their own, 64 out: prefix caching."""
    prefix = draw.tokens(1024)
    return [Row(prefix + draw.tokens(32), 64) for _ in range(64)]


def batch(draw: Draw, count: int) -> list[Row]:
    """That many requests of 64 tokens in and 64 out: decoding in a batch of one size."""
    return [Row(draw.tokens(64), 64) for _ in range(count)]


def long_among_short(draw: Draw) -> list[Row]:
    """32 short prompts decode 192 tokens each while four prompts of 4,096 tokens come in, a second apart."""
    short = [Row(draw.tokens(64), 192) for _ in range(32)]
    return short + [Row(draw.tokens(4096), 16, 0.5 + second) for second in range(4)]


def chat(draw: Draw) -> list[Row]:
    """128 requests of log-normal lengths, as chats have them, in Poisson arrivals at 4 a second."""
    rows: list[Row] = []
    clock = 0.0
    for _ in range(128):
        clock += draw.rng.expovariate(4.0)
        num_in = draw.log_normal(4.6, 1.0, 8, 2048)
        num_out = draw.log_normal(4.6, 0.8, 8, 512)
        rows.append(Row(draw.tokens(num_in), num_out, clock))
    return rows


WORKLOADS: dict[str, Callable[[Draw], list[Row]]] = {
    "offline64": lambda draw: offline(draw, 64),
    "offline256": lambda draw: offline(draw, 256),
    "offline1024": lambda draw: offline(draw, 1024),
    "single": single,
    "prefix64": shared_prefix,
    "longmix": long_among_short,
    "chat": chat,
    "batch1": lambda draw: batch(draw, 1),
    "batch8": lambda draw: batch(draw, 8),
    "batch32": lambda draw: batch(draw, 32),
    "decode64": lambda draw: [Row(draw.tokens(16), 256) for _ in range(64)],
    "decode1": lambda draw: [Row(draw.tokens(16), 256)],
    "decode8": lambda draw: [Row(draw.tokens(16), 256) for _ in range(8)],
    "decode256": lambda draw: [Row(draw.tokens(16), 256) for _ in range(256)],
    "nano256": lambda draw: [Row(draw.tokens(draw.length(100, 1024)), draw.length(100, 1024)) for _ in range(256)],
    "prefill8k": lambda draw: [Row(draw.tokens(8192), 1) for _ in range(8)],
    "prefill64": lambda draw: [Row(draw.tokens(512), 1) for _ in range(64)],
}


def build(name: str, seed: int = 0, vocab: int = 49000) -> list[dict[str, object]]:
    """The requests of a workload: equal for equal arguments, on every machine."""
    rows = WORKLOADS[name](Draw(vocab, random.Random(f"{name}:{seed}")))
    return [
        {
            "id": str(number),
            "prompt_token_ids": row.prompt_token_ids,
            "max_tokens": row.max_tokens,
            "arrival_s": round(row.arrival_s, 4),
        }
        for number, row in enumerate(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(WORKLOADS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=49000)
    given = parser.parse_args()
    json.dump(build(given.name, given.seed, given.vocab), sys.stdout)


if __name__ == "__main__":
    main()
