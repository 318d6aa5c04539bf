"""Compile the Triton kernels for GPUs that need not be there, and say what each takes: registers, spills, memory.

    kernel_report.py [--arch 80 90] [--markdown]

The launches are those of a decode step and a prefill chunk with the shapes of a Qwen3-0.6B in bfloat16 (and, for
experts, a Qwen3-30B-A3B): the ops are called as a forward calls them, and each launch is compiled instead of run.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.low_rank.table import LowRankPiece
from pagoda.kernels.sampling.draw_params import DrawParams
from pagoda.kernels.triton_ops import TritonOps, is_interpreted

BF16 = torch.bfloat16
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch of a kernel, as its argument types and constants."""

    function: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, int]

    @property
    def key(self) -> str:
        return repr((self.function.__name__, self.signature, self.constants, self.attributes, self.options))


@dataclass(frozen=True, slots=True)
class Figures:
    """What a compiled kernel takes.

    registers: per thread.   spills: bytes stored per thread.   shared: bytes per program.   ptx: bytes of its PTX.
    """

    kernel: str
    arch: int
    warps: int
    registers: int
    spills: int
    shared: int
    ptx: int


def launch_of(function: "JITFunction[Any]", args: tuple[object, ...], kwargs: dict[str, object]) -> Launch:
    """Return the types of a launch's arguments, specialised as Triton does: 1, and what 16 divides."""
    names = [parameter.name for parameter in function.params]
    values = dict(zip(names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in names}
    values.update({name: value for name, value in kwargs.items() if name in names})
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(function.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[parameter.name], aligned = "fp32", False
        else:
            assert isinstance(value, int)
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return Launch(function, signature, constants, attributes, options)  # type: ignore[arg-type]


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within it, kernels are not run: the list collects their launches, each kind once."""
    found: dict[str, Launch] = {}
    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: "JITFunction[Any]", *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        launch = launch_of(self, args, kwargs)
        if launch.key not in found:
            found[launch.key] = launch
            launches.append(launch)

    JITFunction.run = record  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def compile_launch(launch: Launch, arch: int) -> Figures:
    """Compile for a GPU of this compute capability (80 for 8.0). Raises what the compiler raises."""
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    ptx = kernel.asm["ptx"]
    registers, spills = assemble(ptx, arch)
    return Figures(
        kernel=launch.function.__name__.strip("_"),
        arch=arch,
        warps=kernel.metadata.num_warps,
        registers=registers,
        spills=spills,
        shared=kernel.metadata.shared,
        ptx=len(ptx),
    )


def assemble(ptx: str, arch: int) -> tuple[int, int]:
    """Return (registers per thread, bytes spilled) as Triton's own ptxas says."""
    target = "sm_90a" if arch == 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"-arch={target}", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr
    if done.returncode:
        raise ValueError(f"ptxas failed: {said}")
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    if registers is None or spills is None:
        raise ValueError(f"ptxas said something else than expected: {said}")
    return int(registers[1]), int(spills[1])


def calls() -> dict[str, Callable[[], object]]:
    """Return the ops to compile by title: each calls them as a forward would, with tensors of real shapes."""
    ops, steady = TritonOps(max_model_len=40_960), TritonOps(max_model_len=40_960, batch_invariant=True)
    tokens, hidden, heads, kv_heads, dim, inner, block = 64, 1024, 16, 8, 128, 3072, 16
    x, weight = torch.zeros(tokens, hidden, dtype=BF16), torch.zeros(hidden, dtype=BF16)
    qkv = torch.zeros(tokens, (heads + 2 * kv_heads) * dim, dtype=BF16)
    q, k, v = ops.split_qkv(qkv, heads, kv_heads, dim)
    tables = torch.zeros(64, dim // 2), torch.zeros(64, dim // 2)
    decode = metadata_of([1] * tokens, 1024, block)
    prefill = metadata_of([tokens], 1024, block)
    shape = (65, kv_heads, block, dim)
    cache = KVLayer(torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16))
    codes = KVLayer(*(torch.zeros(shape, dtype=torch.int8) for _ in range(2)), *(torch.zeros(shape[:3]) for _ in "kv"))
    positions = torch.zeros(tokens, dtype=torch.int32)
    logits = torch.zeros(4, 151_936)
    one = np.ones(4, np.float32)
    draws = DrawParams(one, np.full(4, 50, np.int32), one / 2, one / 50, one.astype(np.float64) / 2)
    linear = ops.prepare_linear(torch.zeros(hidden, hidden, dtype=BF16))
    table = ops.make_low_rank_table(3, hidden, hidden, BF16)
    table.fill(1, [LowRankPiece(torch.zeros(16, hidden), torch.zeros(hidden, 16))])
    slots = torch.ones(tokens, dtype=torch.int32)
    up = ops.prepare_experts([ops.prepare_linear(torch.zeros(1536, 2048, dtype=BF16)) for _ in range(16)])
    down = ops.prepare_experts([ops.prepare_linear(torch.zeros(2048, 768, dtype=BF16)) for _ in range(16)])
    wide, router = torch.zeros(tokens, 2048, dtype=BF16), torch.zeros(tokens, 16, dtype=BF16)
    return {
        "residual sum and RMS norm": lambda: ops.add_rms_norm(x, x, weight, 1e-6),
        "RMS norm of heads": lambda: ops.rms_norm(q, weight[:dim], 1e-6),
        "layer norm": lambda: ops.layer_norm(x, weight, weight, 1e-6),
        "SiLU times up": lambda: ops.silu_mul(torch.zeros(tokens, 2 * inner, dtype=BF16)),
        "GELU": lambda: ops.gelu(x),
        "rotary and KV write": lambda: ops.rotary_write_kv(q, k, v, positions, *tables, cache, decode),
        "rotary and KV write, int8": lambda: ops.rotary_write_kv(q, k, v, positions, *tables, codes, decode),
        "attention, decode": lambda: ops.attention(q, cache, decode, 0.1),
        "attention, decode, int8": lambda: ops.attention(q, codes, decode, 0.1),
        "attention, decode, window and soft cap": lambda: ops.attention(q, cache, decode, 0.1, 512, 50.0),
        "attention, prefill": lambda: ops.attention(q, cache, prefill, 0.1),
        "attention, prefill, int8": lambda: ops.attention(q, codes, prefill, 0.1),
        "attention, prefill, window and soft cap": lambda: ops.attention(q, cache, prefill, 0.1, 512, 50.0),
        "attention, decode, batch-invariant": lambda: steady.attention(q, cache, decode, 0.1),
        "attention, prefill, batch-invariant": lambda: steady.attention(q, cache, prefill, 0.1),
        "linear, batch-invariant": lambda: steady.linear(x, linear),
        "logits, batch-invariant": lambda: steady.logits(x, linear),
        "experts": lambda: ops.moe(wide, router, up, down, 8, True),
        "low rank": lambda: ops.add_low_rank(x, x, slots, table),
        "largest logit": lambda: ops.best_tokens(logits),
        "sampling": lambda: ops.sample(logits, draws, ops.best_tokens(logits)),
        "grammar mask": lambda: ops.mask_logits(logits, np.arange(2), np.zeros((2, 4748), np.int32)),
    }


def metadata_of(query_lens: list[int], seq_len: int, block_size: int) -> AttentionMetadata:
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return AttentionMetadata(
        query_start=starts,
        seq_lens=torch.full((len(query_lens),), seq_len, dtype=torch.int32),
        block_table=torch.zeros(len(query_lens), -(-seq_len // block_size), dtype=torch.int32),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        block_size=block_size,
        max_query_len=max(query_lens),
        max_seq_len=seq_len,
    )


def report(archs: list[int]) -> Iterator[tuple[str, Figures]]:
    """Yield (title, figures) for every kernel that a call launches and no earlier call did."""
    seen: set[str] = set()
    for title, call in calls().items():
        with recorded_launches() as launches:
            call()
        for launch in launches:
            if launch.key not in seen:
                seen.add(launch.key)
                for arch in archs:
                    yield title, compile_launch(launch, arch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, times 10")
    archs: list[int] = parser.parse_args().arch
    if is_interpreted():
        sys.exit("unset TRITON_INTERPRET: interpreted kernels are not compiled")
    print(f"Triton {triton.__version__}, torch {torch.__version__}\n")
    print("| op | kernel | sm | warps | registers | spilled bytes | shared bytes | PTX bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for title, of in report(archs):
        print(f"| {title} | `{of.kernel}` | {of.arch} | {of.warps} | {of.registers} | {of.spills} | {of.shared} | "
              f"{of.ptx} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
