"""A file of weights as the native kernels have packed them: written once, then mapped and shared by all who read it.

The tensors come first, at multiples of 4,096 bytes, then the index, which says what they are and their checksums, then
the tail with the index's own. A file that was cut or changed anywhere is not read.
"""

import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.native.abi import PackedLinear
from pagoda.loading.mapped_file import bytes_of, map_file

_ALIGN = 4096  # as in packed.py
_COLUMNS = 509  # of the words that are summed
_TAIL = struct.Struct("<QI4s")  # of the index: its bytes and checksum
_MAGIC = b"PGW1"


class DamagedFile(Exception):
    """The file is not whole; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor's bytes in the file.   checksum: see `_checksum`."""

    offset: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """The fields of a PackedWeight, and those of its record that are its own: rows, columns, kind, group, in_pairs."""

    out_features: int
    in_features: int
    dtype: str | None
    table_dtype: str
    rows: int
    columns: int
    kind: int
    group: int
    in_pairs: int
    panels: _Span
    bias: _Span | None
    input_order: _Span | None
    next: "_Stored | None"

    def chain(self) -> "Iterator[_Stored]":
        """Yield it and those that follow."""
        yield self
        if self.next is not None:
            yield from self.next.chain()


class PackedFileWriter:
    """Writes the file: weights in the order in which they are added, then `finish`. Raises OSError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._end = file, 0
        self._weights: dict[str, _Stored] = {}

    def add(self, name: str, weight: PackedWeight) -> None:
        """Write a weight's tensors, which may then change."""
        assert name not in self._weights
        self._weights[name] = self._store(weight)

    def finish(self) -> None:
        index = msgspec.json.encode(self._weights)
        self._file.write(index + _TAIL.pack(len(index), zlib.crc32(index), _MAGIC))
        self._file.flush()  # not to the disk: what a power cut leaves has other checksums

    def _store(self, weight: PackedWeight) -> _Stored:
        record = weight.record
        return _Stored(
            weight.out_features,
            weight.in_features,
            None if weight.dtype is None else _name_of(weight.dtype),
            _name_of(weight.table_dtype),
            record.out_features,
            record.in_features,
            record.kind,
            record.group,
            record.in_pairs,
            self._write(weight.panels),
            None if weight.bias is None else self._write(weight.bias),
            None if weight.input_order is None else self._write(weight.input_order),
            None if weight.next is None else self._store(weight.next),
        )

    def _write(self, tensor: torch.Tensor) -> _Span:
        data = tensor.contiguous().view(torch.uint8).numpy()
        span = _Span(self._end, data.nbytes, _checksum(data))
        self._file.write(data.data)
        self._file.write(bytes(-data.nbytes % _ALIGN))
        self._end += -(-data.nbytes // _ALIGN) * _ALIGN
        return span


def read_packed(path: Path, checks: Executor) -> dict[str, PackedWeight]:
    """Return the weights of a file by their names, in its pages, which must not be written to.

    checks: what computes the checksums. Raises OSError, and DamagedFile.
    """
    try:
        data = bytes_of(map_file(path))
    except ValueError:
        raise DamagedFile("it is empty") from None
    stored = _index(data)
    spans = [
        span for of in stored.values() for one in of.chain() for span in (one.panels, one.bias, one.input_order) if span
    ]
    if any(span.offset < 0 or span.num_bytes < 0 or span.offset + span.num_bytes > len(data) for span in spans):
        raise DamagedFile("its tensors are not in it")
    found = checks.map(lambda span: _checksum(_part(data, span)) == span.checksum, spans)
    if not all(found):
        raise DamagedFile("its tensors have other checksums than when they were written")
    return {name: _weight(of, data) for name, of in stored.items()}


def _index(data: np.ndarray) -> dict[str, _Stored]:
    if len(data) < _TAIL.size:
        raise DamagedFile("it is cut")
    num_bytes, checksum, magic = _TAIL.unpack(data[-_TAIL.size :].tobytes())
    index = data[max(0, len(data) - _TAIL.size - num_bytes) : -_TAIL.size].tobytes()
    if magic != _MAGIC or len(index) != num_bytes or zlib.crc32(index) != checksum:
        raise DamagedFile("it is cut, or its end was changed")
    try:
        return msgspec.json.decode(index, type=dict[str, _Stored])
    except msgspec.ValidationError as error:
        raise DamagedFile(f"its index is another one: {error}") from None


def _checksum(data: np.ndarray) -> int:
    """Return the CRC-32 of the sums of columns of 64-bit words: at the speed of memory, four times that of a CRC.

    A change within as many adjacent bytes as a row has changes a sum. Pages and sectors are not a whole number of rows:
    in another order they have other sums.
    """
    whole = len(data) // (8 * _COLUMNS) * (8 * _COLUMNS)
    sums = np.add.reduce(data[:whole].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    return zlib.crc32(data[whole:].data, zlib.crc32(sums.data))


def _weight(stored: _Stored, data: np.ndarray) -> PackedWeight:
    panels = torch.from_numpy(_part(data, stored.panels))
    bias = None if stored.bias is None else torch.from_numpy(_part(data, stored.bias).view(np.float32))
    order = None if stored.input_order is None else torch.from_numpy(_part(data, stored.input_order).view(np.int32))
    after = None if stored.next is None else _weight(stored.next, data)
    record = PackedLinear(
        panels=panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out_features=stored.rows,
        in_features=stored.columns,
        kind=stored.kind,
        group=stored.group,
        next=None if after is None else after.address,
        input_order=None if order is None else order.data_ptr(),
        in_pairs=stored.in_pairs,
    )
    dtype = None if stored.dtype is None else getattr(torch, stored.dtype)
    return PackedWeight(
        stored.out_features,
        stored.in_features,
        dtype,
        getattr(torch, stored.table_dtype),
        record,
        panels,
        bias,
        after,
        order,
    )


def _part(data: np.ndarray, span: _Span) -> np.ndarray:
    return data[span.offset : span.offset + span.num_bytes]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
