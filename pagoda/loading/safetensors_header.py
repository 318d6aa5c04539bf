"""Read the names, dtypes, shapes and files of a checkpoint's tensors from safetensors headers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError
from pagoda.loading.model_files import is_file, read_json_object

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.   dtype: as safetensors names it, "BF16".   name: in its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    name: str

    @property
    def num_bytes(self) -> int:
        return _ITEM_BYTES.get(self.dtype, 1) * prod(self.shape)


def read_headers(folder: Path, subfolders: Sequence[str] = ()) -> dict[str, TensorEntry]:
    """Return all tensors by name, those in a subfolder as `subfolder/name`.

    Raises ConfigError for a truncated or corrupt file, and for a missing shard.
    """
    entries = _read_folder(folder)
    for subfolder in subfolders:
        entries |= {f"{subfolder}/{name}": entry for name, entry in _read_folder(folder / subfolder).items()}
    return entries


def _read_folder(folder: Path) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    places = _read_index(folder)
    for file in shard_files(folder):
        for name, entry in read_header(file).items():
            if name in entries and places.get(name) != file.name:
                if places.get(name) == entries[name].file.name:
                    continue
                raise ConfigError(
                    f"{folder}: tensor {shorten(name)!r} is in {entries[name].file.name} and in {file.name}"
                )
            entries[name] = entry
    return entries


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one file by name. Raises ConfigError if it is truncated or corrupt."""
    try:
        with safe_open(file, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (a handle, not a dict)
            return {
                name: TensorEntry(file, part.get_dtype(), tuple(part.get_shape()), name) for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: truncated or corrupt safetensors: {shorten(str(error))}; fetch it again") from None


def shard_files(folder: Path) -> list[Path]:
    """Return a checkpoint's files: those of the index, or model.safetensors, or all except `consolidated*` copies.

    Raises ConfigError for a corrupt index, and for files that are missing.
    """
    files = [folder / name for name in sorted(set(_read_index(folder).values()))]
    for file in files:
        if not is_file(file):
            raise ConfigError(f"{folder / _INDEX}: shard {shorten(file.name)} is missing; fetch the model again")
    if not files and (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    files = files or sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise ConfigError(f"{folder}: no safetensors files")
    return files


def _read_index(folder: Path) -> dict[str, str]:
    """Return the name of each tensor's file; empty without an index. Raises ConfigError for a corrupt one."""
    index = folder / _INDEX
    if not index.is_file():
        return {}
    try:
        weight_map = read_json_object(index).get("weight_map")
    except ConfigError as error:
        raise ConfigError(f"{index}: corrupt index of shards: {error}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: corrupt index of shards: weight_map must map tensor names to file names")
    for name in set(weight_map.values()):
        if (folder / name).parent != folder:
            raise ConfigError(f"{index}: names a file outside its folder: {shorten(Path(name).name)}")
    return weight_map
