"""read_tensor: read one tensor from an untrusted safetensors file, or an untrusted file that torch.save wrote.

Nothing of such a file is executed, and no library parses it: of the pickle in a torch file, only the opcodes that
describe a tensor are understood. Memory and time grow with the number of bytes alone, whatever the file claims.
"""

import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import numpy as np

from pagoda.base.abbreviate import abbreviate

_MAX_HEADER_BYTES = 64 * 1024
_MAX_PICKLE_BYTES = 4 * 1024  # a tensor's has about 200
_MAX_DIMS = 8
_ZIP_MAGIC = b"PK\x03\x04"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_STORAGES = {"FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16"}
_EXPECTED = "expected a dense tensor of float32, bfloat16 or float16"


class TensorFileError(Exception):
    """The bytes are not a file with one dense tensor; the message says what is wrong."""


def read_tensor(data: bytes, name: str | None = None) -> np.ndarray:
    """Return the tensor of a file in its shape, as float32 or float16 (bfloat16 becomes float32, exactly).

    A safetensors file must have exactly one tensor.   name: that it must have there. Raises TensorFileError.
    """
    try:
        return _read_torch(data) if data[:4] == _ZIP_MAGIC else _read_safetensors(data, name)
    except ValueError:  # of numpy, for sizes beyond what an array may have
        raise TensorFileError("a shape that no tensor has") from None


def _array(data: "bytes | memoryview", dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, "<f4" if dtype == "float32" else "<f2").reshape(shape)


def _is_shape(value: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, list | tuple)
        and len(value) <= _MAX_DIMS
        and all(type(size) is int and 0 <= size < 2**48 for size in value)
    )


# ---- safetensors


def _read_safetensors(data: bytes, wanted: str | None) -> np.ndarray:
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > len(data) - 8:
        raise TensorFileError("neither a safetensors file nor what torch.save writes")
    if header_bytes > _MAX_HEADER_BYTES:
        raise TensorFileError(f"a safetensors header of {header_bytes} bytes; one tensor needs less")
    try:
        header = json.loads(data[8 : 8 + header_bytes])
    except (ValueError, RecursionError):
        raise TensorFileError("neither a safetensors file nor what torch.save writes") from None
    if not isinstance(header, dict):
        raise TensorFileError("a safetensors header that is not an object")
    names = [name for name in header if name != "__metadata__"]
    if len(names) != 1:
        raise TensorFileError(f"{len(names)} tensors in a safetensors file; expected one")
    if wanted is not None and names[0] != wanted:
        raise TensorFileError(f"its tensor is {abbreviate(names[0])}; expected {wanted!r}")
    return _safetensors_array(header[names[0]], memoryview(data)[8 + header_bytes :])


def _safetensors_array(entry: object, data: memoryview) -> np.ndarray:
    if not isinstance(entry, dict):
        raise TensorFileError("a safetensors header without dtype, shape and data_offsets")
    dtype, shape, offsets = (
        _SAFETENSORS_DTYPES.get(str(entry.get("dtype"))),
        entry.get("shape"),
        entry.get("data_offsets"),
    )
    if dtype is None:
        raise TensorFileError(f"elements of another type; {_EXPECTED}")
    if not _is_shape(shape) or not _is_shape(offsets) or len(offsets) != 2:
        raise TensorFileError("a safetensors header without dtype, shape and data_offsets")
    begin, end = offsets
    if not begin <= end <= len(data) or end - begin != prod(shape) * _ITEM_BYTES[dtype]:
        raise TensorFileError("the safetensors file is truncated: its tensor is not in it")
    return _array(data[begin:end], dtype, tuple(shape))


# ---- torch.save


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


# What zipfile raises for archives that are cut, changed, encrypted or of a newer form.
_BROKEN_ARCHIVE = (
    *(zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, OSError, EOFError),
    *(ValueError, OverflowError, LookupError),
)


def _read_torch(data: bytes) -> np.ndarray:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            tensor = _unpickled(_stored(archive, files, "data.pkl", _MAX_PICKLE_BYTES))
            if files.get("byteorder") is not None and _stored(archive, files, "byteorder", 16) != b"little":
                raise TensorFileError("the file's byte order is not little-endian")
            raw = _stored(archive, files, f"data/{tensor.storage.key}", len(data))
    except _BROKEN_ARCHIVE:
        raise TensorFileError("a truncated or corrupt torch file") from None
    return _strided(raw, tensor)


def _stored(archive: zipfile.ZipFile, files: Mapping[str, zipfile.ZipInfo], name: str, most: int) -> bytes:
    """Return a file of the archive. torch.save compresses nothing, so what is compressed is refused unread."""
    info = files.get(name)
    if info is None:
        raise TensorFileError(f"a torch file without {name}; {_EXPECTED}, saved by torch.save")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.file_size > most:
        raise TensorFileError("a torch file with compressed or oversized parts; torch.save compresses nothing")
    return archive.read(info)


def _strided(raw: bytes, tensor: _Tensor) -> np.ndarray:
    """Return the elements of a contiguous tensor in its storage."""
    dtype, shape = tensor.storage.dtype, tensor.shape
    item_bytes, count = _ITEM_BYTES[dtype], prod(shape)
    dense = 1
    for size, stride in zip(reversed(shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != dense:
            raise TensorFileError("the tensor's rows are not adjacent; save tensor.contiguous()")
        dense *= size
    begin = tensor.offset * item_bytes
    if begin + count * item_bytes > len(raw):
        raise TensorFileError("the torch file is truncated: its tensor is not in it")
    return _array(memoryview(raw)[begin : begin + count * item_bytes], dtype, shape)


def _unpickled(data: bytes) -> _Tensor:
    """Return what a pickle of one tensor describes."""
    try:
        found = _run(data)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError):
        raise TensorFileError(f"not a pickle of a tensor; {_EXPECTED}, saved by torch.save") from None
    if not isinstance(found, _Tensor):
        raise TensorFileError(f"not a tensor; {_EXPECTED}, saved by torch.save")
    return found


_CONSTANTS: Mapping[str, Any] = {"EMPTY_TUPLE": (), "NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _run(data: bytes) -> object:
    """Return the object of a pickle, of the few opcodes with which torch.save writes a tensor. Calls nothing."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            stack.append(argument)
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "GLOBAL":
            stack.append(_Global(str(argument)))
        elif name in _TUPLES:
            begin = len(stack) - _TUPLES[name]
            if begin < 0:
                raise IndexError(begin)
            stack[begin:] = [tuple(stack[begin:])]
        elif name == "TUPLE":
            begin = marks.pop()
            stack[begin:] = [tuple(stack[begin:])]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_result(stack.pop(), arguments))
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise TensorFileError(f"its pickle has {name}, which no tensor needs; {_EXPECTED}")
    raise ValueError("no end")


def _storage(described: object) -> _Storage:
    """described: ("storage", type, key, device, elements)."""
    match described:
        case ("storage", _Global(name=kind), str(key), str(), int()):
            dtype = _STORAGES.get(kind.removeprefix("torch "))
            if dtype is None:
                raise TensorFileError(f"elements of another type; {_EXPECTED}")
            return _Storage(dtype, key)
        case _:
            raise TensorFileError(f"its pickle has another object; {_EXPECTED}")


def _result(function: object, arguments: object) -> _Tensor | None:
    """Return what one of the known functions would; None for a tensor's hooks."""
    match function, arguments:
        case _Global(name="collections OrderedDict"), ():
            return None
        case (
            _Global(name="torch._utils _rebuild_tensor_v2"),
            (_Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), *_),
        ) if _is_shape(shape) and _is_shape(strides) and len(shape) == len(strides) and 0 <= offset < 2**48:
            return _Tensor(storage, offset, tuple(shape), tuple(strides))
        case _Global(name="torch._utils _rebuild_parameter"), (_Tensor() as tensor, bool(), *_):
            return tensor
        case _Global(name=called), _:
            is_sparse = "sparse" in called or "layout" in called
            remedy = "; a sparse tensor must be made dense (to_dense)" if is_sparse else ""
            raise TensorFileError(f"its pickle calls {called[:80]!r}; {_EXPECTED}{remedy}")
        case _:
            raise TensorFileError(f"its pickle has another object; {_EXPECTED}")
