"""GGUFFile: a GGUF file's metadata and the locations of its tensors, without reading the weights.

The `gguf` package's own reader builds numpy objects for every string of the vocabulary, 2 s for 49k tokens; this one
finds and decodes them all together, without a loop over them. Quantisation types and their block sizes do come from
that package.
"""

import functools
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.loading.mapped_file import bytes_of, map_file
from pagoda.loading.model_files import gguf_parts, split_gguf
from pagoda.process.out_of_memory import is_out_of_memory

_VERSIONS = (2, 3)
_LARGEST_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_DIMENSIONS = 4
_LENGTH_BYTES = 8  # in front of each string
_WINDOW = 1 << 15  # bytes in which the strings of an array are looked for together

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

T = TypeVar("T", int, float, str, bool)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor.

    shape: as torch has it, outermost first.   part, offset, num_bytes: its location: which file, and where in it.
    """

    name: str
    shape: tuple[int, ...]
    type: "GGMLQuantizationType"
    offset: int
    num_bytes: int
    part: int = 0


def block_of(kind: "GGMLQuantizationType") -> tuple[int, int]:
    """Return how many values of a type are stored together, and their bytes."""
    from gguf.constants import GGML_QUANT_SIZES

    return GGML_QUANT_SIZES[kind]


class StringArray:
    """An array of strings in the file; all are decoded together when the list is first asked for.

    starts: the bytes of the file at which their lengths begin, and the end of the last one: int64 [count + 1].
    """

    def __init__(self, data: mmap.mmap, starts: np.ndarray, path: Path) -> None:
        self._data, self._starts, self._path = data, starts, path

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        """Raises ConfigError for a string that is not UTF-8."""
        begin, end = (int(self._starts[at]) for at in (index, index + 1))
        try:
            return str(self._data[begin + _LENGTH_BYTES : end], "utf-8")
        except UnicodeDecodeError:
            raise self._not_utf8(begin) from None

    @functools.cached_property
    def strings(self) -> list[str]:
        """All of them; shared, not to be changed. Raises ConfigError for a string that is not UTF-8."""
        first, end = int(self._starts[0]), int(self._starts[-1])
        at = self._starts[:-1] - first
        joined = np.frombuffer(self._data, np.uint8, end - first, first).copy()
        joined[at] = 0
        kept = np.ones(len(joined), bool)
        for byte in range(1, _LENGTH_BYTES):
            kept[at + byte] = False
        separated = joined[kept].tobytes()  # each string after a zero byte
        try:
            texts = str(separated, "utf-8").split("\0")[1:]
        except UnicodeDecodeError as error:
            raise self._not_utf8(first + int(at[separated.count(b"\0", 0, error.start) - 1])) from None
        return texts if len(texts) == len(self) else [self[index] for index in range(len(self))]  # one has a zero

    def _not_utf8(self, near: int) -> ConfigError:
        return ConfigError(f"{self._path}: corrupt GGUF: a string near byte {near} is not UTF-8")


Value = int | float | bool | str | np.ndarray | StringArray


class GGUFFile:
    """A GGUF file, memory-mapped; if it is the first part of a model in several files, all of them.

    metadata: key -> scalar, string, numpy array or StringArray, of the first file.   tensors: name -> GGUFTensor, in
    file order.
    Raises ConfigError for a file that is truncated, corrupt, missing, big-endian or of an unknown version.
    """

    def __init__(self, path: Path, part: int = 0) -> None:
        """part: of a model in several files, its number."""
        self.path, self._part = path, part
        try:
            self._data = map_file(path)
        except (OSError, ValueError) as error:
            if is_out_of_memory(error):
                raise CapacityError(
                    f"memory ran out while loading {path}: raise the memory limit (ulimit -v), or lower kv_cache_memory"
                ) from None
            raise ConfigError(f"{path}: cannot be read as GGUF: {error}") from None
        self._size = len(self._data)
        if self._data[:4] != b"GGUF":
            raise ConfigError(f"{path}: not a GGUF file (it starts with {self._data[:4]!r})")
        cursor = _Cursor(self._data, path)
        version = cursor.scalar("<I")
        if version not in _VERSIONS:
            hint = " (big-endian files are not supported)" if version > 0xFFFF else ""
            raise ConfigError(f"{path}: GGUF version {version} is not supported{hint}; supported: 2, 3")
        num_tensors, num_keys = int(cursor.scalar("<Q")), int(cursor.scalar("<Q"))
        self.metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = cursor.text()
            if key in self.metadata:
                raise ConfigError(f"{path}: corrupt GGUF: the key {abbreviate(key)} is there twice")
            self.metadata[key] = cursor.value(key)
        self.tensors = self._read_tensors(cursor, num_tensors)
        self._mapped = [bytes_of(self._data)]
        count, number = (self.get(f"split.{key}", int) or 0 for key in ("count", "no"))
        names = split_gguf(path.name)
        if count > 1 and (count, part) != (len(names), number):
            raise ConfigError(
                f"{path}: is part {number + 1} of a model in {count} files, whose names must end in "
                f"-00001-of-{count:05}.gguf and so on; rename them, and name the first"
            )
        if count > 1 and part == 0:
            self._add_parts(gguf_parts(path, str(path)))

    def _add_parts(self, paths: Sequence[Path]) -> None:
        for number, path in enumerate(paths[1:], 1):
            part = GGUFFile(path, number)
            self._mapped += part._mapped
            if twice := next(iter(self.tensors.keys() & part.tensors.keys()), None):
                first = paths[self.tensors[twice].part].name
                raise ConfigError(
                    f"{self.path}: tensor {abbreviate(twice)} is in {first} and in {path.name}; fetch the model again"
                )
            self.tensors |= part.tensors
        expected = self.get("split.tensors.count", int)
        if expected is not None and expected != len(self.tensors):
            raise ConfigError(
                f"{self.path}: its {len(paths)} files have {len(self.tensors)} tensors, and should have {expected}; "
                "they are not of one model: fetch it again"
            )

    def _read_tensors(self, cursor: "_Cursor", num_tensors: int) -> dict[str, GGUFTensor]:
        # Imported here because it takes 4 % of an API process's start, and most have no such file.
        from gguf.constants import GGMLQuantizationType

        heads: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]] = []
        for _ in range(num_tensors):
            name = cursor.text()
            num_dims = cursor.scalar("<I")
            if num_dims > _MAX_DIMENSIONS:
                raise ConfigError(f"{self.path}: corrupt GGUF: tensor {abbreviate(name)} has {num_dims} dimensions")
            shape = tuple(int(cursor.scalar("<Q")) for _ in range(int(num_dims)))[::-1]
            type_id, offset = int(cursor.scalar("<I")), int(cursor.scalar("<Q"))
            if type_id not in GGMLQuantizationType._value2member_map_:
                raise ConfigError(f"{self.path}: tensor {abbreviate(name)} has the unknown quantisation type {type_id}")
            heads.append((name, shape, GGMLQuantizationType(type_id), offset))
        alignment = self.get("general.alignment", int) or 32
        if not 1 <= alignment <= _LARGEST_ALIGNMENT:
            raise ConfigError(
                f"{self.path}: corrupt GGUF: general.alignment = {alignment}, expected 1 .. {_LARGEST_ALIGNMENT}"
            )
        base = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in heads:
            num_bytes = self._num_bytes(name, shape, kind)
            if base + offset + num_bytes > self._size:
                raise ConfigError(
                    f"{self.path}: truncated: tensor {abbreviate(name)} ends at byte {base + offset + num_bytes}, "
                    f"the file at {self._size}; fetch it again"
                )
            if name in tensors:
                raise ConfigError(f"{self.path}: corrupt GGUF: tensor {abbreviate(name)} is there twice")
            tensors[name] = GGUFTensor(name, shape, kind, base + offset, num_bytes, self._part)
        return tensors

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: "GGMLQuantizationType") -> int:
        block, block_bytes = block_of(kind)
        if not shape or shape[-1] % block:
            raise ConfigError(
                f"{self.path}: corrupt GGUF: tensor {abbreviate(name)} {shape} does not divide into {kind.name} blocks"
            )
        return prod(shape) // block * block_bytes

    def bytes_of(self, tensor: GGUFTensor) -> memoryview:
        """Return the tensor's bytes in the mapped file, without a copy; valid as long as the view exists."""
        return self._mapped[tensor.part][tensor.offset : tensor.offset + tensor.num_bytes].data

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return the scalar or string under `key`, or None. Raises ConfigError if it has another type."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.path}: {key} is {type(value).__name__}, expected {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """Like `get`, but raise ConfigError if there is none."""
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.path}: the metadata has no {key!r}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """Return the string array under `key`, shared, or None. Raises ConfigError if it has another type."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, StringArray):
            raise ConfigError(f"{self.path}: {key} is not an array of strings")
        return value.strings

    def numbers(self, key: str) -> np.ndarray | None:
        """Return the number array under `key`, or None. Raises ConfigError if it has another type."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            raise ConfigError(f"{self.path}: {key} is not an array of numbers")
        return value


def open_gguf(path: Path) -> GGUFFile:
    """Return the file at `path`, which is walked through once although a model's settings are read several times.

    Raises ConfigError as GGUFFile.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as GGUF: {error}") from None
    return _open(path, state.st_mtime_ns, state.st_size)


def forget_gguf() -> None:
    """Let go of the files that `open_gguf` has returned: they stay mapped as long as they are used."""
    _open.cache_clear()


@functools.lru_cache(maxsize=2)
def _open(path: Path, changed_ns: int, size: int) -> GGUFFile:
    return GGUFFile(path)


class _Cursor:
    """Walks the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path = data, path
        self.offset = 4  # after the magic

    def scalar(self, form: str) -> int | float | bool:
        try:
            (value,) = struct.unpack_from(form, self._data, self.offset)
        except struct.error:
            raise self._truncated() from None
        self.offset += struct.calcsize(form)
        return value

    def text(self) -> str:
        length = int(self.scalar("<Q"))
        self._claim(length)
        raw = self._data[self.offset : self.offset + length]
        self.offset += length
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{self._path}: corrupt GGUF: a string at byte {self.offset} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = int(self.scalar("<I"))
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ConfigError(f"{self._path}: corrupt GGUF: {abbreviate(key)} has the unknown type {kind}")
        item_kind, count = int(self.scalar("<I")), int(self.scalar("<Q"))
        if item_kind == _STRING:
            return self._strings(count)
        if item_kind not in _SCALARS:
            raise ConfigError(
                f"{self._path}: {abbreviate(key)} is an array of type {item_kind}, which is not supported"
            )
        item = np.dtype(_SCALARS[item_kind])
        self._claim(count * item.itemsize)
        array = np.frombuffer(self._data, item, count, self.offset)
        self.offset += count * item.itemsize
        return array

    def _strings(self, count: int) -> StringArray:
        self._claim(count * _LENGTH_BYTES)
        found: list[np.ndarray] = []
        missing = count
        while missing:
            found.append(self._walk()[:missing])
            missing -= len(found[-1])
            self.offset = int(found[-1][-1])
            self.offset += _LENGTH_BYTES + int(self._length_at(self.offset))
            self._claim(0)
        return StringArray(self._data, np.concatenate([*found, np.array([self.offset])]), self._path)

    def _walk(self) -> np.ndarray:
        """Return where the string at the cursor starts, and some of those that follow it: int64.

        Nearly all strings are shorter than 256 bytes and have no zero bytes: seven zeros in a row end a length. Each
        that was found this way is checked against the length of the one before it. Where zeros are all there is, as in
        empty strings, they are found one by one.
        """
        window = np.frombuffer(self._data, np.uint8, min(_WINDOW, len(self._data) - self.offset), self.offset)
        if len(window) < _LENGTH_BYTES:
            return np.array([self.offset])
        zero = window == 0
        is_length = zero[1 : len(zero) - 6].copy()
        for byte in range(2, _LENGTH_BYTES):
            is_length &= zero[byte : len(is_length) + byte]
        starts = is_length.nonzero()[0]
        if not len(starts) or starts[0]:
            return np.array([self.offset])  # a long one
        wrong = (starts[:-1] + _LENGTH_BYTES + window[starts[:-1]] != starts[1:]).nonzero()[0]
        if len(wrong) and not wrong[0]:
            found, at = list[int](), 0
            while at < len(is_length) and is_length[at]:
                found.append(at)
                at += _LENGTH_BYTES + int(window[at])
            starts, wrong = np.array(found), wrong[:0]
        return starts[: wrong[0] + 1 if len(wrong) else None] + self.offset

    def _length_at(self, offset: int) -> int:
        if offset + _LENGTH_BYTES > len(self._data):
            raise self._truncated()
        return int.from_bytes(self._data[offset : offset + _LENGTH_BYTES], "little")

    def _claim(self, num_bytes: int) -> None:
        if self.offset + num_bytes > len(self._data):
            raise self._truncated()

    def _truncated(self) -> ConfigError:
        return ConfigError(
            f"{self._path}: truncated or corrupt GGUF: the header runs past the end of the file; fetch it again"
        )
