"""PackedWeights: the weights of an AWQ or GPTQ checkpoint, some of them 4-bit codes, under the names of floats."""

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.packed_format import WORD_CODES, PackedFormat, packed_stem
from pagoda.loading.packed_int4 import check_group_order, in_kernel_groups, read_awq, read_gptq, without_zeros
from pagoda.loading.pieces import Region
from pagoda.loading.safetensors_weights import SafetensorsWeights


class PackedWeights:
    """`layer.weight` is either that tensor, or made of `layer.qweight`, `.qzeros`, `.scales` and, of GPTQ, `.g_idx`."""

    def __init__(self, weights: SafetensorsWeights, stored: PackedFormat) -> None:
        self._weights, self._stored = weights, stored

    def __contains__(self, name: str) -> bool:
        return name in self._weights or packed_stem(name, self._weights) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights. Raises ConfigError as well if the tensors of a packed matrix do not fit together."""
        stem = packed_stem(name, self._weights)
        return self._weights.shape(name) if stem is None else self._check(stem)

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        stem = packed_stem(name, self._weights)
        if stem is None:
            self._weights.read_into(name, out, region)
        else:
            out.copy_(self._read(stem, region).dequantize())

    def has_codes(self, name: str) -> bool:
        return packed_stem(name, self._weights) is not None

    def read_codes(self, name: str, region: Region) -> QuantizedWeight | None:
        stem = packed_stem(name, self._weights)
        return None if stem is None else self._read(stem, region)

    def _check(self, stem: str) -> tuple[int, int]:
        """Return (out, in) of a packed matrix."""
        stored, weights = self._stored, self._weights
        words = weights.shape(f"{stem}.qweight")
        if len(words) != 2:
            raise ConfigError(f"tensor '{stem}.qweight' has the shape {words}; a packed matrix has two dimensions")
        rows, columns = words[1], words[0] * WORD_CODES
        if stored.method == "awq":
            rows, columns = words[1] * WORD_CODES, words[0]
        groups = 1 if stored.group is None else -(-columns // stored.group)
        expected = {
            "qweight": (words, ("I32",)),
            "qzeros": ((groups, -(-rows // WORD_CODES)), ("I32",)),
            "scales": ((groups, rows), ("F16", "BF16", "F32")),
        }
        if f"{stem}.g_idx" in weights:
            expected["g_idx"] = (columns,), ("I32", "I64")
        for part, (shape, dtypes) in expected.items():
            name = f"{stem}.{part}"
            if (found := weights.shape(name)) != shape:
                raise ConfigError(
                    f"tensor {name!r} has the shape {found}, {shape} is what '{stem}.qweight' of the shape {words} and "
                    f"group_size = {-1 if stored.group is None else stored.group} ask for"
                )
            if (dtype := weights.dtype(name)) not in dtypes:
                raise ConfigError(f"tensor {name!r} is {dtype}, expected {' or '.join(dtypes)}")
        return rows, columns

    def _read(self, stem: str, region: Region | None) -> QuantizedWeight:
        out_features, in_features = self._check(stem)
        rows = range(out_features) if region is None else region.rows
        columns = range(in_features) if region is None or region.columns is None else region.columns
        group = self._stored.group or in_features
        if columns.start % group or (columns.stop % group and columns.stop != in_features):
            raise ConfigError(
                f"tensor '{stem}.qweight': columns {columns.start} to {columns.stop} cut its groups of {group}"
            )
        # Whole words of output features, of which the others are then left out.
        words = slice(rows.start // WORD_CODES, -(-rows.stop // WORD_CODES))
        groups = slice(columns.start // group, -(-columns.stop // group))
        features = slice(words.start * WORD_CODES, words.stop * WORD_CODES)
        qweight, qzeros, scales = (self._weights.mapped(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
        qzeros, scales = qzeros[groups, words], scales[groups, features]
        try:
            if self._stored.method == "awq":
                weight = read_awq(qweight[columns.start : columns.stop, words], qzeros, scales, group)
            else:
                if f"{stem}.g_idx" in self._weights:
                    check_group_order(self._weights.mapped(f"{stem}.g_idx"), group)
                at = slice(columns.start // WORD_CODES, columns.stop // WORD_CODES)
                weight = read_gptq(qweight[at, features], qzeros, scales, group, self._stored.stored_zero)
            first = rows.start - features.start
            weight = weight.rows(first, first + len(rows))
            weight = without_zeros(weight) if self._stored.symmetric else weight
        except ConfigError as error:
            raise ConfigError(f"tensor '{stem}.qweight': {error}") from None
        return in_kernel_groups(weight, self._stored.held_as.group)
