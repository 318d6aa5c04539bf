"""Compile the Triton kernels for GPUs that need not be there, and say what each takes: registers, spills, memory.

    kernel_report.py [--arch 80 90] [--only attention]

The launches are those of a decode step and a prefill chunk with the shapes of a Qwen3-0.6B in bfloat16 (linear layers:
a Llama-3.1-8B; experts: a Qwen3-30B-A3B): the ops are called as a forward calls them, and each launch is compiled
instead of run.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.linear.forms import Q4, Q4_MIN, Q6, Q8, WeightForm
from pagoda.kernels.linear.quantize import CodedWeight, Fp8Weight, QuantizedWeight
from pagoda.kernels.low_rank.table import LowRankPiece
from pagoda.kernels.moe import reference as reference_moe
from pagoda.kernels.moe import triton_moe
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.kernels.triton_ops import TritonOps, is_interpreted
from pagoda.loading.packed_codes import packed_weight
from pagoda.loading.quantization import AWQ, GPTQ, PackedFormat
from pagoda.ops.declare import Activation

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
LEAST_ARCH = {"linear, fp8 with fp8, decode": 89, "linear, fp8 with fp8": 89, "experts, fp8 with fp8": 89}
"""Compute capabilities that a call needs, if others have not got its products."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch of a kernel, as its argument types and constants."""

    function: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, Any]
    grids: list[tuple[int, ...]]

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


@contextmanager
def recorded_launches(arch: int = 90) -> Iterator[list[Launch]]:
    """Within it, kernels are bound to their arguments by Triton itself, as for a GPU of this compute capability, but
    not run: the list collects their launches, each of those that Triton compiles once.
    """
    found: dict[str, Launch] = {}
    launches: list[Launch] = []
    old_run, old_compile, old_driver = JITFunction.run, JITFunction._do_compile, driver._active
    current: list[tuple[tuple[int, ...], dict[str, object]]] = []

    def run(self: "JITFunction[Any]", *args: object, grid: tuple[int, ...], **kwargs: Any) -> None:
        names = {parameter.name for parameter in self.params} | {"warmup"}
        current[:] = [(grid, {name: value for name, value in kwargs.items() if name not in names})]
        old_run(self, *args, grid=grid, **kwargs)

    def record(
        self: "JITFunction[Any]", key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any,
        warmup: bool,
    ) -> None:  # fmt: skip
        grid, chosen = current[0]
        launch = found.setdefault(f"{self.__name__} {key}", Launch(self, signature, constants, attributes, chosen, []))
        if not launch.grids:
            launches.append(launch)
        launch.grids.append(grid)

    JITFunction.run, JITFunction._do_compile = run, record  # type: ignore[method-assign]
    driver.set_active(_NoGpu(arch))  # type: ignore[arg-type]
    try:
        yield launches
    finally:
        JITFunction.run, JITFunction._do_compile = old_run, old_compile  # type: ignore[method-assign]
        driver._active = old_driver


class _NoGpu:
    """What a launch asks of Triton's driver before it has a compiled kernel."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return -self._arch  # no GPU has this number: what Triton remembers of a device is not mixed up

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


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
    return {**_ops_of_a_layer(), **_attention(), **_linears(), **_experts(), **_sampling()}


def _ops_of_a_layer() -> dict[str, Callable[[], object]]:
    ops: Any = TritonOps(max_model_len=40_960, multiplies_fp8=True)
    tokens, hidden, heads, kv_heads, dim, inner = 64, 1024, 16, 8, 128, 3072
    x, weight = torch.zeros(tokens, hidden, dtype=BF16), torch.zeros(hidden, dtype=BF16)
    q, k, v = ops.split_qkv(torch.zeros(tokens, (heads + 2 * kv_heads) * dim, dtype=BF16), heads, kv_heads, dim)
    tables = torch.zeros(64, dim // 2), torch.zeros(64, dim // 2)
    decode = metadata_of([1] * tokens, 1024, 16)
    positions = torch.zeros(tokens, dtype=torch.int32)
    table = ops.make_low_rank_table(3, hidden, hidden, BF16)
    table.fill(1, [LowRankPiece(torch.zeros(16, hidden), torch.zeros(hidden, 16))])
    slots = torch.ones(tokens, dtype=torch.int32)

    def write(dtype: torch.dtype) -> object:
        return ops.rotary_write_kv(q, k, v, positions, *tables, cache_of(dtype), decode)

    blocks = ops.make_device_blocks([torch.zeros(65, kv_heads * 16 * dim, dtype=BF16) for _ in range(56)])
    pairs = np.array([(1, 2), (3, 4)], np.int32)

    return {
        "copies of blocks": lambda: blocks.copy(pairs),
        "blocks to be swapped out": lambda: blocks.read(pairs[:, 0]),
        "blocks swapped in": lambda: blocks.write(pairs[:, 0], torch.zeros(2, blocks.words, dtype=blocks.word)),
        "residual sum and RMS norm": lambda: ops.add_rms_norm(x, x, weight, 1e-6),
        "RMS norm of heads": lambda: ops.rms_norm(q, weight[:dim], 1e-6),
        "layer norm": lambda: ops.layer_norm(x, weight, weight, 1e-6),
        "SiLU times up": lambda: ops.gate(torch.zeros(tokens, 2 * inner, dtype=BF16), Activation.SILU),
        "GELU": lambda: ops.activate(x, Activation.GELU),
        "rotary and KV write": lambda: write(BF16),
        "rotary and KV write, int8": lambda: write(torch.int8),
        "rotary and KV write, fp8": lambda: write(FP8),
        "low rank": lambda: ops.add_low_rank(x, x, slots, table),
    }


def _attention() -> dict[str, Callable[[], object]]:
    ops: Any = TritonOps(max_model_len=40_960, multiplies_fp8=True)
    steady: Any = TritonOps(max_model_len=40_960, batch_invariant=True, multiplies_fp8=True)
    q, k = torch.zeros(64, 16, 128, dtype=BF16), torch.zeros(64, 8, 128, dtype=BF16)
    decode, prefill = metadata_of([1] * 64, 1024, 16), metadata_of([64], 1024, 16)
    cache, int8, fp8 = cache_of(BF16), cache_of(torch.int8), cache_of(FP8)
    shared = replace(decode, shared_prefix=torch.zeros(2, dtype=torch.int32))
    return {
        "attention, decode": lambda: ops.attention(q, cache, decode, 0.1),
        "attention, decode, shared prefix": lambda: ops.attention(q, cache, shared, 0.1),
        "attention, decode, shared prefix, fp8": lambda: ops.attention(q, fp8, shared, 0.1),
        "attention, decode, int8": lambda: ops.attention(q, int8, decode, 0.1),
        "attention, decode, fp8": lambda: ops.attention(q, fp8, decode, 0.1),
        "attention, decode, window and soft cap": lambda: ops.attention(q, cache, decode, 0.1, 512, 50.0),
        "attention, prefill": lambda: ops.attention(q, cache, prefill, 0.1),
        "attention, prefill, int8": lambda: ops.attention(q, int8, prefill, 0.1),
        "attention, prefill, fp8": lambda: ops.attention(q, fp8, prefill, 0.1),
        "attention, prefill, window and soft cap": lambda: ops.attention(q, cache, prefill, 0.1, 512, 50.0),
        "attention, bidirectional": lambda: ops.bidirectional_attention(q, k, k, prefill, 0.1),
        "attention, bidirectional, window": lambda: ops.bidirectional_attention(q, k, k, prefill, 0.1, 512),
        "attention, decode, batch-invariant": lambda: steady.attention(q, cache, decode, 0.1),
        "attention, prefill, batch-invariant": lambda: steady.attention(q, cache, prefill, 0.1),
    }


def _linears() -> dict[str, Callable[[], object]]:
    ops: Any = TritonOps(max_model_len=40_960, multiplies_fp8=True)
    steady: Any = TritonOps(max_model_len=40_960, batch_invariant=True, multiplies_fp8=True)
    widening: Any = TritonOps(max_model_len=40_960, multiplies_fp8=False)
    few, many = torch.zeros(8, 4096, dtype=BF16), torch.zeros(512, 4096, dtype=BF16)
    plain = ops.prepare_linear(torch.zeros(6144, 4096, dtype=BF16))
    made: dict[str, Callable[[], object]] = {
        "linear, one row": lambda: ops.linear(few[:1], plain),
        "linear, batch-invariant": lambda: steady.linear(few, plain),
        "logits, batch-invariant": lambda: steady.logits(few, plain),
    }
    for title, weight in coded(6144, 4096).items():
        by = widening if title == "fp8" else ops
        prepared = by.prepare_quantized_linear(weight, BF16)
        made[f"linear, {title}, decode"] = partial(by.linear, few, prepared)
        made[f"linear, {title}"] = partial(by.linear, many, prepared)
    return made


def _experts() -> dict[str, Callable[[], object]]:
    x = torch.zeros(64, 2048, dtype=BF16)
    # By torch, so that they exist: what a launch that is recorded and not run gives is undefined.
    chosen = reference_moe.route(torch.zeros(64, 4, dtype=BF16), 2, True)
    made: dict[str, Callable[[], object]] = {}
    ops: Any = TritonOps(max_model_len=40_960, multiplies_fp8=True)
    shapes = (1536, 2048), (2048, 768)
    of_shapes = [coded(*shape) for shape in shapes]
    for title in ("", *of_shapes[0]):
        by = TritonOps(max_model_len=40_960, multiplies_fp8=False) if title == "fp8" else ops
        stacks = []
        for shape, weights in zip(shapes, of_shapes, strict=True):
            if title:
                one = by.prepare_quantized_linear(weights[title], BF16)
            else:
                one = by.prepare_linear(torch.zeros(shape, dtype=BF16))
            stacks.append(by.prepare_experts([one] * 4))
        made[f"experts, {title}" if title else "experts"] = partial(by.moe, x, *chosen, *stacks)
    made["experts, routing"] = partial(triton_moe.route, torch.zeros(64, 128, dtype=BF16), 8, True)
    return made


def coded(out_features: int, in_features: int) -> dict[str, CodedWeight]:
    """Return a weight of every form, by title."""

    def grouped(form: WeightForm, group: int) -> QuantizedWeight:
        scales = torch.zeros(out_features, in_features // group, dtype=torch.float16)
        codes = torch.zeros(out_features, in_features, dtype=torch.uint8)
        return QuantizedWeight(form, codes, scales, scales if form is Q4_MIN else None, in_features, group)

    zero_points = partial(with_zero_points, out_features, in_features)
    fp8 = Fp8Weight(torch.zeros(out_features, in_features, dtype=FP8), torch.zeros(out_features))
    return {
        "int8": grouped(Q8, 64),
        "Q8_0": grouped(Q8, 32),
        "Q4_0": grouped(Q4, 32),
        "Q4_K": grouped(Q4_MIN, 32),
        "AWQ": zero_points(128),
        "AWQ, groups of 64": zero_points(64),
        "AWQ, groups of 32": zero_points(32),
        "GPTQ, symmetric": symmetric_gptq(out_features, in_features, 128),
        "Q6_K": grouped(Q6, 16),
        "fp8": fp8,
        "fp8 with fp8": fp8,
    }


def with_zero_points(out_features: int, in_features: int, group: int) -> QuantizedWeight:
    """Return a weight as the loader makes it of an AWQ checkpoint, or of a GPTQ checkpoint that is not symmetric."""
    qweight = torch.zeros(in_features, out_features // 8, dtype=torch.int32)
    qzeros = torch.zeros(in_features // group, out_features // 8, dtype=torch.int32)
    scales = torch.zeros(in_features // group, out_features, dtype=torch.float16)
    return packed_weight(PackedFormat("awq", AWQ, group, symmetric=False), qweight, scales, qzeros).read()


def symmetric_gptq(out_features: int, in_features: int, group: int) -> QuantizedWeight:
    """Return a weight as the loader makes it of a symmetric GPTQ checkpoint: all zero points are the middle."""
    stored = PackedFormat("gptq", GPTQ, group, symmetric=True, stored_zero=1)
    qweight = torch.zeros(in_features // 8, out_features, dtype=torch.int32)
    qzeros = torch.full((in_features // group, out_features // 8), 0x7777_7777, dtype=torch.int32)
    scales = torch.zeros(in_features // group, out_features, dtype=torch.float16)
    return packed_weight(stored, qweight, scales, qzeros).read()


def _sampling() -> dict[str, Callable[[], object]]:
    ops: Any = TritonOps(multiplies_fp8=True)
    logits = torch.zeros(4, 151_936)
    one = np.ones(4, np.float32)
    draws = DrawParams(one, np.full(4, 50, np.int32), one / 2, one / 50, one.astype(np.float64) / 2)
    return {
        "largest logit": lambda: ops.best_tokens(logits),
        "sampling": lambda: ops.sample(logits, draws, ops.best_tokens(logits)),
        "log-probabilities": lambda: ops.top_logprobs(logits, torch.zeros(len(logits), dtype=torch.int64), 20),
        "grammar mask": lambda: ops.mask_logits(logits, np.arange(2), np.zeros((2, 4748), np.int32)),
    }


def cache_of(dtype: torch.dtype) -> KVLayer:
    shape = (65, 8, 16, 128)
    scales = (torch.zeros(shape[:3]) if dtype.itemsize == 1 else None for _ in range(2))
    return KVLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), *scales)


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


def report(archs: list[int], only: str = "") -> Iterator[tuple[str, Figures]]:
    """Yield (title, figures) for every kernel that a call launches and no earlier call did.

    only: part of the titles to report; all if empty.
    """
    seen: set[str] = set()
    for title, call in calls().items():
        if only not in title:
            continue
        with recorded_launches() as launches:
            call()
        for launch in launches:
            if launch.key not in seen:
                seen.add(launch.key)
                for arch in archs:
                    if arch >= LEAST_ARCH.get(title, 0):
                        yield title, compile_launch(launch, arch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities, times 10")
    parser.add_argument("--only", default="", help="only the ops with this in their title")
    options = parser.parse_args()
    archs: list[int] = options.arch
    if is_interpreted():
        sys.exit("unset TRITON_INTERPRET: interpreted kernels are not compiled")
    print(f"Triton {triton.__version__}, torch {torch.__version__}\n")
    print("| op | kernel | sm | warps | registers | spilled bytes | shared bytes | PTX bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for title, of in report(archs, options.only):
        print(f"| {title} | `{of.kernel}` | {of.arch} | {of.warps} | {of.registers} | {of.spills} | {of.shared} | "
              f"{of.ptx} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
