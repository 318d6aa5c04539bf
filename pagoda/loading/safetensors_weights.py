"""SafetensorsWeights: read weights by name from a folder of safetensors."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.loading.packed_format import packed_stem
from pagoda.loading.pieces import Region
from pagoda.loading.safetensors_header import read_headers

_FLOATS = {"F64", "F32", "F16", "BF16"}


class SafetensorsWeights:
    """A folder of safetensors, memory-mapped: a tensor's pages are read when it is copied out."""

    def __init__(self, folder: Path, subfolders: Sequence[str] = ()) -> None:
        self._folder = folder
        self._entries = read_headers(folder, subfolders)
        files = {entry.file for entry in self._entries.values()}
        self._open = {file: safe_open(file, framework="pt") for file in files}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            if (stem := packed_stem(name, self._entries)) is not None:
                raise ConfigError(
                    f"{self._folder}: tensor {name!r} is missing, but there is '{stem}.qweight': the weights are "
                    "quantised, and config.json has no quantization_config that says how; fetch the model again"
                )
            raise missing_tensor(name, list(self._entries), self._folder)
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Return the type of a tensor that exists, as safetensors names it."""
        return self._entries[name].dtype

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor that exists, of any dtype, as a view of the mapped file. Raises ConfigError."""
        entry = self._entries[name]
        try:
            return self._open[entry.file].get_tensor(entry.name)
        except SafetensorError as error:
            raise ConfigError(f"{entry.file}: tensor {name!r} cannot be read: {error}") from None

    def read_into(self, name: str, out: torch.Tensor, region: Region | None = None) -> None:
        entry = self._entries[name]
        if entry.dtype not in _FLOATS:
            raise ConfigError(f"{entry.file}: tensor {name!r} is {entry.dtype}, which is not supported as a weight")
        out.copy_(_part_of(self.mapped(name), region))

    def has_codes(self, name: str) -> bool:
        return False

    def read_codes(self, name: str, region: Region) -> QuantizedWeight | None:
        return None


def _part_of(tensor: torch.Tensor, region: Region | None) -> torch.Tensor:
    if region is None:
        return tensor
    if region.index is not None:
        tensor = tensor[region.index]
    tensor = tensor[region.rows.start : region.rows.stop]
    return tensor if region.columns is None else tensor[:, region.columns.start : region.columns.stop]


def missing_tensor(name: str, known: list[str], path: Path) -> ConfigError:
    hint = nearest(name, known) if len(known) < 5000 else ""
    hint = hint if "did you mean" in hint else ""
    return ConfigError(f"{path}: tensor {name!r} is missing{hint}")
