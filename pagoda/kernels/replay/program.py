"""A recorded program: its calls of ops in the form that replay/cpu.cpp reads, its memory, and the call that runs it."""

from collections.abc import Mapping, Sequence
from ctypes import Array, addressof, byref, c_int64, c_void_p, sizeof
from dataclasses import dataclass, field
from math import prod

import torch

from pagoda.kernels.batch import AttentionMetadata, ForwardBatch
from pagoda.kernels.collectives.shared_memory import SharedGroup, check_groups
from pagoda.kernels.native.abi import KERNEL_OPS, Binding, Check, Run, Shared
from pagoda.kernels.native.abi import Program as ProgramStruct
from pagoda.kernels.native.abi import Step as StepStruct
from pagoda.kernels.native.arguments import fill_group
from pagoda.kernels.native.checks import bad_group, bad_index
from pagoda.kernels.native.dtypes import ELEMENT_BYTES, TORCH_DTYPES
from pagoda.kernels.native.huge_pages import huge_zeros
from pagoda.kernels.native.library import NativeLibrary
from pagoda.ops.declare import Domain, DType

_CODES = {op.name: code for code, op in enumerate(KERNEL_OPS)}


class Value:
    """The result of a call, or an input: contiguous rows of one domain. Compared by identity.

    row_shape: (), (dim,) or (heads, dim).   name: of an input, else None.   below: what a result's indices are below.
    """

    def __init__(
        self,
        row_shape: tuple[int, ...],
        dtype: DType,
        domain: Domain,
        name: str | None = None,
        below: int | None = None,
    ) -> None:
        self.row_shape, self.dtype, self.domain, self.name, self.below = row_shape, dtype, domain, name, below

    @property
    def row_elements(self) -> int:
        return prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        return self.row_elements * ELEMENT_BYTES[self.dtype]


@dataclass(slots=True, eq=False)
class OpCall:
    """One call of a kernel.

    record: its argument struct.   inputs: Rows arguments, by name, as a value and the first element that the op reads.
    outputs: by name.   arguments: what the op was called with.   kept: what `record` points to.
    """

    op: str
    record: Shared | None = None
    inputs: dict[str, tuple[Value, int]] = field(default_factory=dict[str, tuple[Value, int]])
    outputs: dict[str, Value] = field(default_factory=dict[str, Value])
    arguments: dict[str, object] = field(default_factory=dict[str, object])
    kept: list[object] = field(default_factory=list[object])


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """An input whose elements index a table of `limit` rows, or the rows of a domain."""

    value: Value
    limit: int | Domain


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """A group of rows in a cache of `num_blocks` blocks, NO_CACHE for whole rows.

    queries: whose rows its queries are, None if only its slots are used.
    written: whose rows its slots are for, None if nothing is written.
    """

    group: int
    queries: Domain | None
    written: Domain | None
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The calls, results, inputs and checks of a recorded forward.

    groups: structs that the calls point to, of the batch and then of its output rows; filled in for every run.
    inputs: every named input, used or not.
    """

    calls: Sequence[OpCall]
    results: Sequence[Value]
    inputs: Mapping[str, Value]
    groups: Array[Shared]
    checks: Sequence[IndexCheck | GroupCheck]


class Program:
    """A recording with its memory laid out, ready to run on any batch with the same inputs. One run at a time."""

    def __init__(self, library: NativeLibrary, threads: int, recording: Recording) -> None:
        self._library, self._threads, self._recording = library, threads, recording
        slots, slot_bytes = assign_slots(recording.calls, recording.results)
        places = dict(slots)
        for value in (*recording.inputs.values(), *recording.results):
            places[value] = len(slot_bytes) + len(places) - len(slots)
        self._first_place = len(slot_bytes)
        self._places = (c_void_p * (len(slot_bytes) + len(recording.inputs) + len(recording.results)))()
        self._rows = (c_int64 * len(Domain))()
        self._bindings: list[Array[Shared]] = []
        self._steps = (StepStruct * len(recording.calls))(*(self._step(call, places) for call in recording.calls))
        self._checks = (Check * len(recording.checks))(*(self._check(check, places) for check in recording.checks))
        sizes = [of.get(domain, 0) for of in slot_bytes for domain in Domain]
        self._slot_bytes = (c_int64 * len(sizes))(*sizes)
        self._program = ProgramStruct(
            *(addressof(part) for part in (self._steps, self._checks, self._slot_bytes)),
            len(self._steps),
            len(self._checks),
            len(slot_bytes),
        )
        self._run = Run(addressof(self._rows), addressof(self._places))
        self._program_ref, self._run_ref = byref(self._program), byref(self._run)
        self._groups = list(recording.groups)  # the same memory
        self._rank_groups = {kept for call in recording.calls for kept in call.kept if isinstance(kept, SharedGroup)}
        # Plain tuples, because every step loops over them.
        self._inputs = [
            (name, int(value.domain), TORCH_DTYPES[value.dtype], value.row_shape)
            for name, value in recording.inputs.items()
        ]
        self._results = [(int(value.domain), TORCH_DTYPES[value.dtype], value.row_shape) for value in recording.results]
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._times: Array[c_int64] | None = None
        self._replay, self._scratch_bytes = library["replay"], library["replay_scratch_bytes"]

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def measure(self) -> None:
        """From now on, record how long each kind of op takes; costs 0.1 microseconds per op."""
        self._times = (c_int64 * len(KERNEL_OPS))()

    def seconds(self) -> dict[str, float]:
        """Return the time spent in each kind of op since `measure`, by name."""
        return {} if self._times is None else {name: self._times[code] * 1e-9 for name, code in _CODES.items()}

    def region_seconds(self) -> float:
        """Return the time that an empty parallel region takes."""
        return self._library["empty_region_ns"](self._threads, 2000) * 1e-9

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        """Run the recorded forward on `batch`; return its results.

        Raises ValueError for inputs of another dtype or shape than were recorded, and InvariantBroken for a token id,
        position, slot or block id outside its table; nothing is computed then. Raises WorkerDied if another rank fails.
        """
        tensors = named_inputs(batch)
        places, place = self._places, self._first_place
        counts = [-1] * len(Domain)
        for name, domain, dtype, row_shape in self._inputs:
            tensor = tensors[name]
            count = tensor.shape[0]
            if counts[domain] != count:
                if counts[domain] >= 0:
                    raise ValueError(f"input {name} has {count} rows, others of its domain have {counts[domain]}")
                counts[domain] = count
            if tensor.dtype is not dtype or tensor.dim() != 1 + len(row_shape) or not tensor.is_contiguous():
                raise _unlike(name, dtype, row_shape, tensor)
            if row_shape and tensor.shape[1:] != row_shape:
                raise _unlike(name, dtype, row_shape, tensor)
            places[place] = tensor.data_ptr()
            place += 1
        self._rows[:] = counts  # -1 for a domain that this program does not have: nothing has its rows
        results: list[torch.Tensor] = []
        for domain, dtype, row_shape in self._results:
            results.append(torch.empty((counts[domain], *row_shape), dtype=dtype))
            places[place] = results[-1].data_ptr()
            place += 1
        self._fill_groups(batch)
        needed = self._scratch_bytes(self._program_ref, self._rows) + 64
        if self._scratch.numel() < needed:
            self._scratch = huge_zeros(needed)  # 4 % less time for a batch of embeddings than on small pages
        self._run.scratch = -(-self._scratch.data_ptr() // 64) * 64
        bad = self._replay(self._program_ref, self._run_ref, self._threads, self._times)
        if bad:
            raise self._error(bad, tensors)
        check_groups(self._rank_groups)
        return tuple(results)

    def _fill_groups(self, batch: ForwardBatch) -> None:
        groups, count = self._groups, len(batch.metadata)
        for index, metadata in enumerate(batch.metadata):
            fill_group(groups[index], metadata)
        for index, metadata in enumerate(batch.outputs.metadata):
            if metadata is batch.metadata[index]:  # plain decoding: all rows are output rows
                self._recording.groups[count + index] = groups[index]
            else:
                fill_group(groups[count + index], metadata)

    def _error(self, bad: int, tensors: Mapping[str, torch.Tensor]) -> Exception:
        check, at = self._recording.checks[self._run.bad_check], self._run.bad_at
        if isinstance(check, GroupCheck):
            return bad_group(bad, at, check.num_blocks)
        name = check.value.name or ""
        limit = self._rows[check.limit] if isinstance(check.limit, Domain) else check.limit
        return bad_index(name, int(tensors[name].view(-1)[at]), at, limit)

    def _step(self, call: OpCall, places: Mapping[Value, int]) -> Shared:
        record = call.record
        assert record is not None
        bindings: list[Shared] = []
        for name, (value, offset) in (*call.inputs.items(), *((n, (value, 0)) for n, value in call.outputs.items())):
            at = getattr(type(record), name).offset
            bindings.append(Binding(places[value], value.domain, at, offset * ELEMENT_BYTES[value.dtype]))
        array = (Binding * len(bindings))(*bindings)
        self._bindings.append(array)
        return StepStruct(_CODES[call.op], len(bindings), addressof(record), addressof(array))

    def _check(self, check: IndexCheck | GroupCheck, places: Mapping[Value, int]) -> Shared:
        if isinstance(check, GroupCheck):
            group = addressof(self._recording.groups) + check.group * sizeof(self._recording.groups._type_)
            queries, written = (-1 if domain is None else domain for domain in (check.queries, check.written))
            return Check(group, check.num_blocks, 0, queries, 0, 0, written)
        limit = -1 - check.limit if isinstance(check.limit, Domain) else check.limit
        value = check.value
        return Check(None, limit, places[value], value.domain, value.dtype, value.row_elements)


def _unlike(name: str, dtype: torch.dtype, row_shape: tuple[int, ...], tensor: torch.Tensor) -> ValueError:
    return ValueError(
        f"input {name} was recorded as contiguous {dtype} with rows of shape {row_shape}, "
        f"not {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
    )


def named_inputs(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch that a forward may read row by row, by name."""
    return {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "output_index": batch.outputs.index,
        "logits_index": batch.logits_index,
        **{name: given.tensor for name, given in batch.inputs.items()},
    }


def assign_slots(calls: Sequence[OpCall], results: Sequence[Value]) -> tuple[dict[Value, int], list[dict[Domain, int]]]:
    """Return the slot of scratch memory of each value, and each slot's bytes per row of a domain.

    A slot is reused after the last read of its value, so a forward needs little memory, which stays in the CPU cache. A
    call's outputs never share a slot with its inputs. Results and inputs have no slot.
    """
    last_use = {value: index for index, call in enumerate(calls) for value, _ in call.inputs.values()}
    slots: dict[Value, int] = {}
    sizes: list[dict[Domain, int]] = []
    free: list[int] = []
    for index, call in enumerate(calls):
        for value in call.outputs.values():
            if value in results:
                continue
            slot = _best_slot(value, free, sizes)
            if slot is None:
                slot = len(sizes)
                sizes.append({})
            else:
                free.remove(slot)
            sizes[slot][value.domain] = max(sizes[slot].get(value.domain, 0), value.row_bytes)
            slots[value] = slot
        done = [value for value, _ in call.inputs.values()]
        done += [value for value in call.outputs.values() if value not in last_use]
        free += sorted({slots[value] for value in done if value in slots and last_use.get(value, index) == index})
    return slots, sizes


def _best_slot(value: Value, free: Sequence[int], sizes: Sequence[Mapping[Domain, int]]) -> int | None:
    """Return the smallest free slot that can hold `value`, otherwise the largest; None if none is free."""
    if not free:
        return None

    def size(slot: int) -> int:
        return sizes[slot].get(value.domain, 0)

    large = [slot for slot in free if size(slot) >= value.row_bytes]
    return min(large, key=size) if large else max(free, key=size)


def metadata_of(batch: ForwardBatch) -> tuple[AttentionMetadata, ...]:
    """Return the groups of the batch, then those of its output rows."""
    return batch.metadata + batch.outputs.metadata
