"""read_tensor: read one tensor from an untrusted safetensors file, or an untrusted file that torch.save wrote.

Nothing of such a file is executed: of the pickle in a torch file, only the opcodes and names that describe a tensor are
taken, and what they stand for is here (see "Restricting Globals" in Python's pickle). Memory and time grow with the
number of bytes alone, whatever the file claims. No torch: the processes that read these files do not import it.
"""

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeGuard

import numpy as np
from safetensors import SafetensorError, deserialize

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
    except (ValueError, OverflowError):  # of numpy, for sizes beyond what an array may have
        raise TensorFileError("a shape that no tensor has") from None


def _array(data: "bytes | bytearray | memoryview", dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, "<f4" if dtype == "float32" else "<f2").reshape(shape)


def _is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    return (
        isinstance(value, tuple)
        and len(value) <= _MAX_DIMS
        and all(type(size) is int and 0 <= size < 2**48 for size in value)
    )


# ---- safetensors


def _read_safetensors(data: bytes, wanted: str | None) -> np.ndarray:
    header_bytes = int.from_bytes(data[:8], "little")
    if _MAX_HEADER_BYTES < header_bytes <= len(data):
        raise TensorFileError(f"a safetensors header of {header_bytes} bytes; one tensor needs less")
    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        raise TensorFileError(
            f"neither a safetensors file nor what torch.save writes, or not a whole one: {abbreviate(str(error))}"
        ) from None
    if len(tensors) != 1:
        raise TensorFileError(f"{len(tensors)} tensors in a safetensors file; expected one")
    [(name, tensor)] = tensors
    if wanted is not None and name != wanted:
        raise TensorFileError(f"its tensor is {abbreviate(name)}; expected {wanted!r}")
    dtype = _SAFETENSORS_DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise TensorFileError(f"elements of another type; {_EXPECTED}")
    return _array(tensor["data"], dtype, tuple(tensor["shape"]))


# ---- torch.save


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


_OPCODES = frozenset(
    (
        *("PROTO", "GLOBAL", "MARK", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NEWTRUE", "NEWFALSE"),
        *("NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "BINPUT", "BINGET", "BINPERSID", "REDUCE"),
        "STOP",
    )
)
"""With which torch.save writes a tensor. None changes an object, or takes more memory than it has bytes."""

# What pickle raises for a pickle that is cut or changed, and for calls with other arguments.
_BROKEN_PICKLE = (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError)


def _unpickled(data: bytes) -> _Tensor:
    """Return what a pickle of one tensor describes."""
    try:
        for opcode, _, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise TensorFileError(f"its pickle has {opcode.name}, which no tensor needs; {_EXPECTED}")
        found = _TensorUnpickler(io.BytesIO(data)).load()
    except _BROKEN_PICKLE:
        raise TensorFileError(f"not a pickle of a tensor; {_EXPECTED}, saved by torch.save") from None
    if not isinstance(found, _Tensor):
        raise TensorFileError(f"not a tensor; {_EXPECTED}, saved by torch.save")
    return found


class _TensorUnpickler(pickle.Unpickler):
    """Makes a `_Tensor`. The names in a pickle stand for what is here: nothing is imported, and nothing else called."""

    def find_class(self, module: str, name: str, /) -> object:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2":
                return _tensor
            case "torch._utils", "_rebuild_parameter":
                return lambda tensor, *_: tensor
            case "collections", "OrderedDict":  # of hooks
                return lambda: None
            case "torch", _ if name.endswith("Storage"):
                if (dtype := _STORAGES.get(name)) is None:
                    raise TensorFileError(f"elements of another type; {_EXPECTED}")
                return dtype
            case _:
                remedy = "; a sparse tensor must be made dense (to_dense)" if "sparse" in name else ""
                raise TensorFileError(f"its pickle calls {abbreviate(f'{module}.{name}', 80)}; {_EXPECTED}{remedy}")

    def persistent_load(self, pid: object, /) -> _Storage:
        match pid:  # "storage", type, key, device, elements
            case ("storage", str(dtype), str(key), str(), int()) if dtype in _ITEM_BYTES:
                return _Storage(dtype, key)
            case _:
                raise TensorFileError(f"its pickle has another object; {_EXPECTED}")


def _tensor(*arguments: object) -> _Tensor:
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(strides), *_) if (
            _is_shape(shape) and _is_shape(strides) and len(shape) == len(strides) and 0 <= offset < 2**48
        ):
            return _Tensor(storage, offset, shape, strides)
        case _:
            raise TensorFileError(f"its pickle has another object; {_EXPECTED}")
