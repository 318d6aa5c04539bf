"""Linear layers on the native kernels: weights packed once into panels, then multiplied by `linear/gemm.cpp`."""

import ctypes
from ctypes import c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from pagoda.kernels.linear.arena import WeightArena
from pagoda.kernels.linear.packed_bytes import PANEL
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.native.dtypes import DTYPE_CODES
from pagoda.kernels.native.library import NativeLibrary

_Q8, _Q4, _Q4_MIN = 3, 4, 5  # `Kind` in packed.h; the kinds of unquantised weights are their dtype codes


class _Record(ctypes.Structure):
    """`PackedLinear` of packed.h."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("kind", c_int32),
        ("group", c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] in the kernels' layout.

    dtype: what x must be; None for quantised weights, which take any.   address: of the record the kernels are given.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype | None
    record: _Record
    panels: torch.Tensor
    bias: torch.Tensor | None

    @property
    def address(self) -> int:
        return ctypes.addressof(self.record)


class PackedLinears:
    """Packs and multiplies. Every output element is summed along `in_features` in one order, whatever the batch."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self._threads = threads
        self._arena = WeightArena()
        functions = library.functions
        self._linear = functions["pagoda_linear"]
        self._linear.argtypes = (c_void_p, c_int, c_void_p, c_int64, c_int64, c_int, c_void_p, c_int)
        self._bytes = functions["pagoda_linear_bytes"]
        self._bytes.argtypes, self._bytes.restype = (c_void_p,), c_int64
        self._pack_words = functions["pagoda_pack_words"]
        self._pack_words.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int)
        self._pack_codes = functions["pagoda_pack_codes"]
        self._pack_codes.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p, c_int)
        for function in (self._linear, self._pack_words, self._pack_codes):
            function.restype = None

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        """A copy of weight [out, in], float32, bfloat16 or float16, in panels; the original is not kept."""
        out_features, in_features = weight.shape
        packed = self._empty(out_features, in_features, weight.dtype, DTYPE_CODES[weight.dtype], 0, bias)
        if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
            weight = torch.nn.functional.pad(weight, (0, 1))
        weight = weight.contiguous()
        word_bytes = 2 if weight.dtype == torch.float16 else 4
        steps = weight.shape[1] * weight.element_size() // word_bytes
        self._pack_words(
            word_bytes, weight.data_ptr(), packed.panels.data_ptr(), packed.out_features, steps, self._threads
        )
        return packed

    def prepare_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> PackedWeight:
        """The codes and scales in panels; inputs will be quantised by the same groups."""
        assert weight.group in ((32, 64) if weight.bits == 8 else (32,))
        kind = _Q8 if weight.bits == 8 else _Q4 if weight.minima is None else _Q4_MIN
        packed = self._empty(weight.codes.shape[0], weight.in_features, None, kind, weight.group, bias)
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        minima = None if weight.minima is None else weight.minima.contiguous()
        minima_pointer = None if minima is None else minima.data_ptr()
        self._pack_codes(packed.address, codes.data_ptr(), scales.data_ptr(), minima_pointer, self._threads)
        return packed

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        return self._multiply(x, weight, x.dtype)

    def logits(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """[S, in] -> float32 [S, out], not rounded on the way."""
        return self._multiply(x, weight, torch.float32)

    def _multiply(self, x: torch.Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> torch.Tensor:
        assert x.shape[1] == weight.in_features
        assert weight.dtype is None or x.dtype == weight.dtype
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, weight.out_features), dtype=out_dtype)
        self._linear(
            weight.address, DTYPE_CODES[x.dtype], x.data_ptr(), rows, x.stride(0),
            DTYPE_CODES[out_dtype], out.data_ptr(), self._threads,
        )  # fmt: skip
        return out

    def _empty(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype | None,
        kind: int,
        group: int,
        bias: torch.Tensor | None,
    ) -> PackedWeight:
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, -out_features % PANEL)).contiguous()
        bias_pointer = None if bias is None else bias.data_ptr()
        record = _Record(None, bias_pointer, out_features, in_features, kind, group)
        panels = self._arena.allocate(self._bytes(ctypes.addressof(record)))
        record.panels = panels.data_ptr()
        return PackedWeight(out_features, in_features, dtype, record, panels, bias)
