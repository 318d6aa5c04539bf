"""8-bit floats (e4m3) in Triton as bytes, by integer arithmetic: GPUs before compute capability 8.9 lack the type.

Torch tensors of float8_e4m3fn are passed as views of uint8.
"""

import triton.language as tl

from pagoda.kernels.triton_jit import jit


@jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Return 2^-8 times the numbers that are e4m3 in uint8: their bits, moved into float16. NaN becomes 1.875."""
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)


@jit
def to_e4m3(x):
    """Return float32 as the nearest e4m3 in uint8, ties to even. |x| must not exceed 448, or round to more."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # the exponent's bias: 127 -> 7
    # Adding 1.5 * 2^23 leaves the nearest integer in the low bits, ties to even: of x in units of 2^-9.
    small = (tl.abs(x) * 512.0 + 12582912.0).to(tl.uint32, bitcast=True) & 15
    code = tl.where(magnitude < 0x3C800000, small, normal)  # 2^-6, the smallest normal number
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
