"""What a Hopper GPU would compute, read from compiled kernels; to be run with TRITON_INTERPRET=0, and without a GPU.

Prints JSON: "fp8 sums", per product of 8-bit floats, the elements that are summed in low precision; "layouts", of a
batch-invariant decode and of a prefill, which threads hold what in their products and sums, in order; "loads ahead",
per form of weights, the places in the code that begin to load a tile while another is multiplied.
"""

import json
import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_report import BF16, FP8, cache_of, coded, metadata_of, recorded_launches
from pagoda.kernels.linear.quantize import Fp8Weight
from pagoda.kernels.triton_ops import TritonOps

ARCH = 90


def compiled(call: Any) -> dict[str, str]:
    """Return TritonGPU's code of each kernel that a call launches."""
    with recorded_launches(ARCH) as launches:
        call()
    code: dict[str, str] = {}
    for of in launches:
        source = ASTSource(of.function, of.signature, of.constants, of.attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=of.options)
        code[of.function.__name__] = kernel.asm["ttgir"]
    return code


def fp8_sums() -> list[int]:
    ops: Any = TritonOps(multiplies_fp8=True)
    weight = ops.prepare_quantized_linear(Fp8Weight(torch.zeros(64, 512, dtype=FP8), torch.zeros(64)), BF16)
    found: list[int] = []
    for rows in (40, 70):
        code = compiled(lambda rows=rows: ops.linear(torch.zeros(rows, 512, dtype=BF16), weight))["_linear"]
        found += [int(most) for most in re.findall(r"warp_group_dot .*maxNumImpreciseAcc = (\d+)", code)]
    return found


def loads_ahead() -> dict[str, int]:
    ops: Any = TritonOps(multiplies_fp8=False)
    found: dict[str, int] = {}
    for title, weight in coded(128, 512).items():
        prepared = ops.prepare_quantized_linear(weight, BF16)
        code = compiled(lambda prepared=prepared: ops.linear(torch.zeros(70, 512, dtype=BF16), prepared))["_linear"]
        found[title] = code.count("ttg.async_copy_global_to_local")
    return found


def layouts() -> list[list[str]]:
    ops: Any = TritonOps(batch_invariant=True, multiplies_fp8=True)
    cache, metadata = cache_of(BF16), metadata_of([1, 100], 1000, 16)
    code = compiled(lambda: ops.attention(torch.zeros(101, 16, 128, dtype=BF16), cache, metadata, 0.1))
    return [_layouts_of(code[name]) for name in ("attend_splits", "attend_tiles")]


def _layouts_of(code: str) -> list[str]:
    """Return the types of products and sums, with the layouts written out instead of named."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    found: list[str] = []
    for match in re.finditer(r"ttng\.warp_group_dot |tt\.dot |\"tt\.reduce\"", code):
        types = code.index("}) :" if "reduce" in match[0] else " : ", match.start())
        line = code[types : code.index("\n", types)].partition(" loc(")[0]
        found.append(match[0] + re.sub(r"#\w+", lambda name: named.get(name[0], name[0]), line))
    return found


if __name__ == "__main__":
    print(json.dumps({"fp8 sums": fp8_sums(), "layouts": layouts(), "loads ahead": loads_ahead()}))
