"""Native recurrent ops next to what memory allows, on shapes of models of about 1B and 3B.

    recurrent_roofline.py [--threads 1] [--rounds 5] [--tokens 256] [--layers granite-4-h-1b lfm2-1.2b]

decode: one token of each of so many rows that their states are larger than any cache. A state is read and written; so
is every number of an equally large tensor that is multiplied in place, before and after each round.
prompt: tokens of one row, whose state stays in the cache; the time of one layer.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.linear_roofline import clock_of
from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.native import library
from pagoda.kernels.native.huge_pages import huge_zeros
from pagoda.kernels.native_ops import NativeOps

_LEAST_BYTES = 192 << 20
_BLOCK_SIZE = 512
_BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Scan:
    """A layer with a matrix [key_dim, value_dim] per head.   groups: of keys and queries."""

    op: str
    heads: int
    groups: int
    key_dim: int
    value_dim: int

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.key_dim * self.value_dim

    def states(self, num_blocks: int) -> KVLayer:
        v = huge_zeros(num_blocks * self.state_bytes).view(torch.float32).fill_(0.5)
        k = torch.zeros(num_blocks, 3, 1, 8, dtype=_BF16)
        return KVLayer(k, v.view(num_blocks, self.heads, self.key_dim, self.value_dim))

    def call(self, ops: NativeOps, num_tokens: int) -> Callable[[KVLayer, AttentionMetadata], object]:
        x = torch.randn(num_tokens, self.heads * self.value_dim + 2 * self.groups * self.key_dim).to(_BF16)
        numbers, of_heads = torch.randn(num_tokens, self.heads).to(_BF16), -torch.rand(self.heads)  # states decay
        numbers_of = {"mamba2": (numbers,), "gated_delta": (numbers, numbers)}[self.op]
        parameters = (of_heads,) * (3 if self.op == "mamba2" else 2)
        op = getattr(ops, self.op)
        return lambda states, at: op(x, *numbers_of, *parameters, states, at)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A short convolution."""

    channels: int
    taps: int
    silu: bool = True

    @property
    def state_bytes(self) -> int:
        return 2 * (self.taps - 1) * self.channels

    def states(self, num_blocks: int) -> KVLayer:
        k = huge_zeros(num_blocks * self.state_bytes).view(_BF16).view(num_blocks, self.taps - 1, 1, self.channels)
        return KVLayer(k, k[..., :0])

    def call(self, ops: NativeOps, num_tokens: int) -> Callable[[KVLayer, AttentionMetadata], object]:
        x, weight = torch.randn(num_tokens, self.channels).to(_BF16), torch.randn(self.taps, self.channels).to(_BF16)
        return lambda states, at: ops.short_conv(x, weight, None, states, at, silu=self.silu)  # type: ignore[attr-defined]


LAYERS: dict[str, Scan | Convolution] = {
    "granite-4-h-1b": Scan("mamba2", 48, 1, 128, 64),
    "mamba2-2.7b": Scan("mamba2", 80, 1, 128, 64),
    "falcon-h1-1.5b": Scan("mamba2", 48, 1, 256, 64),
    "qwen3.5-2b": Scan("gated_delta", 16, 16, 128, 128),
    "qwen3-next-80b-a3b": Scan("gated_delta", 32, 16, 128, 128),
    "lfm2-1.2b": Convolution(2048, 3, silu=False),
    "granite-4-h-1b: convolution": Convolution(3328, 4),
    "qwen3-next-80b-a3b: convolution": Convolution(8192, 4),
}


def metadata(lens: list[tuple[int, int]]) -> AttentionMetadata:
    """Rows of (computed, new) tokens, each in a block of its own."""
    new = torch.tensor([0, *(new for _, new in lens)], dtype=torch.int32)
    return AttentionMetadata(
        query_start=new.cumsum(0).to(torch.int32),
        seq_lens=torch.tensor([sum(pair) for pair in lens], dtype=torch.int32),
        block_table=torch.arange(1, len(lens) + 1, dtype=torch.int32).unsqueeze(1),
        slot_mapping=torch.zeros(int(new.sum()), dtype=torch.int64),
        block_size=_BLOCK_SIZE,
        max_query_len=max(count for _, count in lens),
        max_seq_len=max(sum(pair) for pair in lens),
    )


def decode_gb_s(ops: NativeOps, layer: Scan | Convolution, rounds: int) -> tuple[float, float]:
    """Return the GB/s that decodes read and write, and those of a product in place: medians."""
    clock, num_blocks = clock_of(ops), -(-_LEAST_BYTES // layer.state_bytes)
    states, call = layer.states(num_blocks), layer.call(ops, num_blocks - 1)
    at = metadata([(5, 1)] * (num_blocks - 1))
    numbers = huge_zeros(_LEAST_BYTES).view(torch.float32).fill_(1)

    def timed(body: Callable[[], object]) -> float:
        begin = clock()
        body()
        return clock() - begin

    found: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        before = timed(lambda: numbers.mul_(1.0))
        secs = timed(lambda: call(states, at))
        after = timed(lambda: numbers.mul_(1.0))
        found.append((2e-9 * layer.state_bytes * len(at.seq_lens) / secs, 4e-9 * numbers.nbytes / (before + after)))
    decode, product = zip(*found[1:], strict=True)  # the first round touches the pages
    return statistics.median(decode), statistics.median(product)


def prompt_s(ops: NativeOps, layer: Scan | Convolution, num_tokens: int, rounds: int) -> float:
    """Return the least seconds per token of a row's first tokens."""
    clock, states, call = clock_of(ops), layer.states(2), layer.call(ops, num_tokens)
    at, secs = metadata([(0, num_tokens)]), list[float]()
    for _ in range(rounds):
        begin = clock()
        call(states, at)
        secs.append(clock() - begin)
    return min(secs) / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help=f"of a prompt, up to {_BLOCK_SIZE}")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ops = NativeOps(library.load(), args.threads)
    print("| layer | state | decode, GB/s | product in place, GB/s | share | prompt, us per token | per second |")
    print("|---|---|---|---|---|---|---|")
    for name in args.layers:
        layer = LAYERS[name]
        decode, product = decode_gb_s(ops, layer, args.rounds)
        secs = prompt_s(ops, layer, args.tokens, args.rounds)
        print(
            f"| {name} | {layer.state_bytes / 1024:.0f} KiB | {decode:.1f} | {product:.1f} | {decode / product:.0%} | "
            f"{secs * 1e6:.2f} | {1 / secs:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
