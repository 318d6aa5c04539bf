"""LoRA adapters of a worker: which are loaded, in which slots, and which row uses which."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch

from pagoda.base.errors import PagodaError, RequestError
from pagoda.core.request import LoraRef
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.linear.packed import PackedTable
from pagoda.kernels.low_rank.table import FillableLowRank, LowRankPiece
from pagoda.kernels.ops import Ops
from pagoda.layers.linear import Embedding
from pagoda.layers.module import walk
from pagoda.layers.parameter import Matrix, Parameter, Table
from pagoda.loading.adapters.files import AdapterTargets, check_adapter
from pagoda.loading.adapters.weights import read_adapter, read_copies
from pagoda.models.base import Model
from pagoda.ops.tensor import LinearWeight, Tensor
from pagoda.process.out_of_memory import is_out_of_memory

logger = logging.getLogger("pagoda")

_COMPARED_ROWS = 4096

AdapterPieces: TypeAlias = dict[Parameter[object], list[LowRankPiece]]
"""What an adapter's files say about each parameter that it adapts."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """max_loaded: adapters held at once, in use or not.   max_rank: of one adapter."""

    max_loaded: int
    max_rank: int


class AdapterStore:
    """The adapters that are loaded, each in a slot of the tables of the layers that it adapts.

    The engine says which are loaded and unloaded, between steps. Another thread may read one meanwhile; it is kept
    aside until the next step, and where it finds no free slot then, because rows of ended requests have not left theirs
    yet, or no memory, until a row needs it. The file is identified by its digest: a request never gets other weights
    than those it was accepted for.
    tables: by identity of the weight that a layer passes to its op; a layer gets one with its first adapter.
    """

    def __init__(
        self,
        model: Model,
        targets: AdapterTargets,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        limits: AdapterLimits,
    ) -> None:
        self._targets = targets
        self._ops, self._dtype, self._device = ops, dtype, device
        self._limits = limits
        self._embeddings = {id(module.weight): module for _, module in walk(model) if isinstance(module, Embedding)}
        self._tables: dict[int, FillableLowRank] = {}
        self._slots: dict[str, int] = {}  # by digest
        self._aside: dict[str, Future[AdapterPieces]] = {}  # by digest: without a slot
        self._users = np.zeros(limits.max_loaded + 1, np.int64)  # rows, by slot
        self._unloaded: set[str] = set()  # digests to drop when their last user leaves

    @property
    def tables(self) -> Mapping[int, FillableLowRank]:
        return self._tables

    @property
    def max_slots(self) -> int:
        return self._limits.max_loaded + 1

    def acquire(self, ref: LoraRef) -> int:
        """Return the slot of an adapter that is loaded, which stays until as many `release`.

        Raises RequestError if it is not, or if all slots are in use.
        """
        slot = self._slots.get(ref.digest)
        if slot is None:
            slot = self._free_slot()
            if ref.digest not in self._aside:
                raise RequestError("it is not loaded", "model")
            if slot is None:
                raise RequestError(f"all {self._limits.max_loaded} adapters that fit in memory are in use", "model")
            self._fill(slot, ref.digest)
        self._users[slot] += 1
        return slot

    def load(self, ref: LoraRef) -> None:
        """Read an adapter now, into a slot if there is a free one.

        Raises PagodaError that says why it cannot be used.
        """
        read: Future[AdapterPieces] = Future()

        def read_now() -> Future[AdapterPieces]:
            read.set_result(self.read(ref))
            return read

        self.begin(ref, read_now)
        slot = self._free_slot()
        if ref.digest in self._aside and slot is not None:
            self._fill(slot, ref.digest)

    def begin(self, ref: LoraRef, read: Callable[[], "Future[AdapterPieces]"]) -> "Future[AdapterPieces] | None":
        """Begin to load an adapter, unless it is loaded. Return when it can be used, or cannot; None: now.

        read: begins to call `self.read`, on a thread.
        """
        self._unloaded.discard(ref.digest)
        known = self._aside.get(ref.digest)
        if ref.digest in self._slots:
            return None
        if known is None or (known.done() and known.exception() is not None):
            known = self._aside[ref.digest] = read()
        return known

    def settle(self) -> None:
        """Give adapters that have been read a slot, as far as there are free ones, and memory."""
        for digest in [digest for digest, read in self._aside.items() if read.done() and read.exception() is None]:
            slot = self._free_slot()
            if slot is None:
                return
            try:
                self._fill(slot, digest)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return  # requests that need it fail with this, and no others

    def unload(self, ref: LoraRef) -> None:
        """Drop an adapter, as soon as no row uses it. Ignore one that is not loaded."""
        self._aside.pop(ref.digest, None)
        slot = self._slots.get(ref.digest)
        if slot is None:
            return
        if self._users[slot]:
            self._unloaded.add(ref.digest)
        else:
            self._drop(ref.digest)

    def share(self, slot: int) -> None:
        """One more row uses the slot."""
        self._users[slot] += 1

    def release(self, slot: int) -> None:
        """One row less uses the slot."""
        self._users[slot] -= 1
        if self._unloaded and not self._users[slot]:
            for digest in [digest for digest in self._unloaded if self._slots[digest] == slot]:
                self._drop(digest)

    def _free_slot(self) -> int | None:
        taken = set(self._slots.values())
        return next((slot for slot in range(1, self.max_slots) if slot not in taken), None)

    def _drop(self, digest: str) -> None:
        self._unloaded.discard(digest)
        self._clear(self._slots.pop(digest))

    def _clear(self, slot: int) -> None:
        for table in self._tables.values():
            table.clear(slot)

    def read(self, ref: LoraRef) -> AdapterPieces:
        """Return what the adapter's files say about each parameter that it adapts. May be called on any thread.

        Raises PagodaError that says why it cannot be used.
        """
        begin_s = time.perf_counter()
        files = check_adapter(Path(ref.path), self._targets, self._limits.max_rank)
        if files.digest != ref.digest:
            raise RequestError(
                f"adapter {ref.name!r}: its files have changed since it was loaded; load it again", "model"
            )
        for target, copy in read_copies(files).items():
            self._check_copy(target, copy)
        pieces = read_adapter(files, self._targets, self._device)
        logger.info("adapter %s read in %.3f s", ref.name, time.perf_counter() - begin_s)
        return pieces

    def _fill(self, slot: int, digest: str) -> None:
        """Put an adapter that has been read into a slot. If that fails, it stays aside."""
        try:
            for parameter, pieces in self._aside[digest].result().items():
                embedding = self._embeddings.get(id(parameter))
                if embedding is not None and embedding.scale != 1.0:
                    pieces = [replace(piece, b=piece.b * embedding.scale) for piece in pieces]
                self._table_of(parameter).fill(slot, pieces)
        except BaseException:
            self._clear(slot)
            raise
        self._slots[digest] = slot
        del self._aside[digest]

    def _table_of(self, parameter: Parameter[object]) -> FillableLowRank:
        key = id(parameter.value)
        table = self._tables.get(key)
        if table is None:
            declared = parameter.declared
            assert isinstance(declared, Matrix | Table)
            shape = parameter.shard.shape
            if isinstance(declared, Table):
                shape = (declared.columns, declared.rows)
            table = self._tables[key] = self._ops.make_low_rank_table(self.max_slots, *shape, self._dtype)
        return table

    def _check_copy(self, path: str, copy: torch.Tensor) -> None:
        """Raise RequestError unless a copy of the embedding or head in an adapter's file is the model's own."""
        target = self._targets.targets[path]
        if target.is_elsewhere:
            return
        value = target.parameter.value
        table = cast(Tensor, value) if target.is_embedding else self._ops.table_of(cast(LinearWeight, value))
        remedy = "save the adapter again with save_embedding_layers=False"
        own_rows = target.parameter.shard.rows[0]
        copy = copy[own_rows.start : own_rows.stop]
        if table is None or (isinstance(table, PackedTable) and table.is_coded):
            raise RequestError(f"it has a copy of {path}, which cannot be compared to quantised weights; {remedy}")
        for begin in range(0, len(copy), _COMPARED_ROWS):
            rows = copy[begin : begin + _COMPARED_ROWS].to(device=self._device, dtype=self._dtype)
            ids = torch.arange(begin, begin + len(rows), dtype=torch.int32, device=self._device)
            own = self._ops.embedding(ids, table)
            assert isinstance(own, torch.Tensor)
            if not torch.equal(own, rows):
                raise RequestError(f"it has a {path} that is not the model's, which is not supported; {remedy}")


class Adapters:
    """The adapter of each row of the table.   store: has their weights."""

    def __init__(self, store: AdapterStore, max_rows: int) -> None:
        self.store = store
        self._slots = np.zeros(max_rows, np.int32)
        self._failed: dict[int, str] = {}

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's events, in SchedulerOutput's order. A row whose adapter cannot be used fails, alone."""
        for row in output.released.tolist():
            self._forget(row)
        self.store.settle()
        for init in output.admitted:
            self._forget(init.row)
            if init.lora is None:
                continue
            try:
                self._slots[init.row] = self.store.acquire(init.lora)
            except Exception as error:
                if not isinstance(error, PagodaError | OSError) and not is_out_of_memory(error):
                    raise
                why = str(error) or "memory ran out"  # a MemoryError may say nothing
                logger.warning("adapter %s cannot be used: %s", init.lora.name, why)
                self._failed[init.row] = f"the adapter {init.lora.name!r} cannot be used: {why}"
        for fork in output.forks:
            self._forget(fork.dst)
            slot = self._slots[fork.src]
            if slot:
                self.store.share(slot)
                self._slots[fork.dst] = slot

    def slots_of(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the slot of every row of the table, int32 [max_rows]; None if none of `rows` has an adapter."""
        return self._slots if self._slots[rows].any() else None

    def failed(self, rows: np.ndarray) -> dict[int, str]:
        """Return which of `rows` cannot run, and why."""
        if not self._failed:
            return {}
        return {row: self._failed[row] for row in rows.tolist() if row in self._failed}

    def _forget(self, row: int) -> None:
        if self._slots[row]:
            self.store.release(int(self._slots[row]))
            self._slots[row] = 0
        self._failed.pop(row, None)
