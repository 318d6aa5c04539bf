"""The layer program: its steps as the kernels read them (replay/cpu.cpp), and the call that walks it."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from pagoda.kernels.batch import ForwardBatch
from pagoda.kernels.native.dtypes import DTYPE_CODES
from pagoda.kernels.native.library import NativeLibrary

_NOTHING, _RESULT = -1, -2
_MAX_SLOTS = 32


class Op(IntEnum):
    EMBEDDING = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    ADD = 3
    LINEAR = 4
    ROTARY = 5
    WRITE_KV = 6
    ATTENTION = 7
    GATED = 8
    SOFTCAP = 9
    SELECT = 10


class Gate(IntEnum):
    NONE = 0
    SILU = 1
    GELU_TANH = 2


class Value:
    """What one step computes: `width` elements a token, contiguous. Compared by identity.

    tail: of the tokens of the batch's tail only.
    """

    def __init__(self, width: int, tail: bool = False) -> None:
        self.width = width
        self.tail = tail


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Part of a value: elements from `offset` on in each token."""

    value: Value
    offset: int = 0


@dataclass(slots=True, eq=False)
class Step:
    """One call of a kernel; which pointers, numbers and factors it takes stands in cpu.cpp.

    group: index of a KV group; those of the tail come after those of the batch.
    """

    op: Op
    inputs: list[View] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    group: int = 0
    pointers: Sequence[int | None] = ()
    numbers: Sequence[int] = ()
    factors: Sequence[float] = ()


class _View(Structure):
    _fields_ = (("offset", c_int64), ("stride", c_int64), ("slot", c_int32), ("unused", c_int32))


class _Step(Structure):
    _fields_ = (
        ("op", c_int32),
        ("group", c_int32),
        ("tail", c_int32),
        ("unused", c_int32),
        ("inputs", _View * 2),
        ("outputs", _View * 2),
        ("pointers", c_void_p * 6),
        ("numbers", c_int64 * 5),
        ("factors", c_float * 2),
    )


class _Program(Structure):
    _fields_ = (
        ("steps", POINTER(_Step)),
        ("slot_widths", POINTER(c_int64)),
        ("num_steps", c_int64),
        ("num_slots", c_int64),
        ("dtype", c_int32),
        ("unused", c_int32),
    )


class _Group(Structure):
    _fields_ = (
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("slot_mapping", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int64),
        ("num_rows", c_int64),
    )


class _Batch(Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("groups", POINTER(_Group)),
        ("tail_index", c_void_p),
        ("scratch", c_void_p),
        ("result", c_void_p),
        ("num_tokens", c_int64),
        ("num_tail", c_int64),
    )


class Program:
    """Steps with their memory laid out, ready to run on any batch.

    result: what `run` returns.   num_groups: KV groups of the batch.   kept: what the steps' pointers point to.
    """

    def __init__(
        self,
        library: NativeLibrary,
        threads: int,
        steps: Sequence[Step],
        result: Value,
        num_groups: int,
        dtype: torch.dtype,
        kept: Sequence[object],
    ) -> None:
        self._threads, self._dtype, self._result, self._kept = threads, dtype, result, tuple(kept)
        slots, widths = assign_slots(steps, result)
        assert len(widths) <= _MAX_SLOTS
        self._steps = (_Step * len(steps))(*(_packed(step, slots) for step in steps))
        self._widths = (c_int64 * len(widths))(*widths)
        self._program = _Program(self._steps, self._widths, len(steps), len(widths), DTYPE_CODES[dtype], 0)
        self._groups = (_Group * (2 * num_groups))()
        self._batch = _Batch(groups=self._groups)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._times: Array[c_int64] | None = None
        self._library = library
        self._replay = library.functions["pagoda_replay"]
        self._replay.argtypes, self._replay.restype = (POINTER(_Program), POINTER(_Batch), c_int, c_void_p), None
        self._scratch_bytes = library.functions["pagoda_replay_scratch_bytes"]
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = (POINTER(_Program), c_int64), c_int64

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def measure(self) -> None:
        """From now on keep how long each kind of op takes; costs a tenth of a microsecond an op."""
        self._times = (c_int64 * len(Op))()

    def seconds(self) -> dict[Op, float]:
        """Time spent in each kind of op since `measure`; a linear layer's holds the gate fused into it."""
        return {} if self._times is None else {op: self._times[op] * 1e-9 for op in Op}

    def region_seconds(self) -> float:
        """What entering and leaving a parallel region takes, without work in it."""
        measure = self._library.functions["pagoda_empty_region_ns"]
        measure.argtypes, measure.restype = (c_int, c_int), c_double
        return measure(self._threads, 2000) * 1e-9

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """The recorded forward on `batch`: [T or num_tail, width of the result]."""
        num_tokens, num_tail = batch.token_ids.shape[0], batch.tail.index.shape[0]
        result = torch.empty((num_tail if self._result.tail else num_tokens, self._result.width), dtype=self._dtype)
        needed = self._scratch_bytes(self._program, num_tokens) + 64
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        for to, metadata in zip(self._groups, batch.metadata + batch.tail.metadata, strict=True):
            to.query_start = metadata.query_start.data_ptr()
            to.seq_lens = metadata.seq_lens.data_ptr()
            to.block_table = metadata.block_table.data_ptr()
            to.slot_mapping = metadata.slot_mapping.data_ptr()
            to.table_stride = metadata.block_table.stride(0)
            to.block_size = metadata.block_size
            to.num_rows = metadata.seq_lens.shape[0]
        record = self._batch
        record.token_ids, record.positions = batch.token_ids.data_ptr(), batch.positions.data_ptr()
        record.scratch = -(-self._scratch.data_ptr() // 64) * 64
        record.result = result.data_ptr()
        record.tail_index = batch.tail.index.data_ptr()
        record.num_tokens, record.num_tail = num_tokens, num_tail
        self._replay(self._program, record, self._threads, self._times)
        return result


def assign_slots(steps: Sequence[Step], result: Value) -> tuple[dict[Value, int], list[int]]:
    """Which slot of scratch memory each value takes, and each slot's width in elements a token.

    A slot is taken again once its value was read for the last time, so a forward works on little memory that stays in
    the cache. A step's outputs never share a slot with its inputs.
    """
    last_use = {view.value: index for index, step in enumerate(steps) for view in step.inputs}
    slots: dict[Value, int] = {result: _RESULT}
    widths: list[int] = []
    free: list[int] = []
    for index, step in enumerate(steps):
        for value in step.outputs:
            if value is result:
                continue
            slot = _best_slot(value.width, free, widths)
            if slot is None:
                slot = len(widths)
                widths.append(0)
            else:
                free.remove(slot)
            widths[slot] = max(widths[slot], value.width)
            slots[value] = slot
        done = [view.value for view in step.inputs] + [value for value in step.outputs if value not in last_use]
        free += sorted({slots[value] for value in done if last_use.get(value, index) == index and value is not result})
    return slots, widths


def _best_slot(width: int, free: Sequence[int], widths: Sequence[int]) -> int | None:
    """The smallest free slot that holds `width`, else the largest; None when none is free."""
    if not free:
        return None
    large = [slot for slot in free if widths[slot] >= width]
    return min(large, key=lambda slot: widths[slot]) if large else max(free, key=lambda slot: widths[slot])


def _packed(step: Step, slots: dict[Value, int]) -> _Step:
    record = _Step(op=step.op, group=step.group, tail=any(value.tail for value in step.outputs))
    for views in (record.inputs, record.outputs):
        for view in views:
            view.slot = _NOTHING
    for to, view in zip(record.inputs, step.inputs, strict=False):
        to.slot, to.offset, to.stride = slots[view.value], view.offset, view.value.width
    for to, value in zip(record.outputs, step.outputs, strict=False):
        to.slot, to.offset, to.stride = slots[value], 0, value.width
    record.pointers[: len(step.pointers)] = step.pointers
    record.numbers[: len(step.numbers)] = step.numbers
    record.factors[: len(step.factors)] = step.factors
    return record


assert ctypes.sizeof(_Step) == 16 + 4 * 24 + 6 * 8 + 5 * 8 + 8
