"""Record a forward: the model runs once on stand-ins, and every op that it calls becomes a call of a program.

No op is named here: a call's inputs, outputs and checks follow from the op table.
"""

from collections.abc import Callable, Sequence
from ctypes import addressof, sizeof
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import NoReturn, cast

import torch

from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, Input, KVLayer, OutputRows
from pagoda.kernels.linear.forms import PANEL
from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.native.abi import NO_CACHE, RowGroup
from pagoda.kernels.native.arguments import RowsFacts, prepare_call
from pagoda.kernels.native.dtypes import DTYPE_CODES
from pagoda.kernels.native.library import NativeLibrary
from pagoda.kernels.replay.program import (
    GroupCheck,
    IndexCheck,
    OpCall,
    Program,
    Recording,
    Value,
    metadata_of,
)
from pagoda.ops.declare import Domain, Group, Op, Rows, Slots
from pagoda.ops.forward import FORWARD_OPS, FUSIONS, OP_TABLE, ForwardOps
from pagoda.ops.tensor import Tensor

# arbitrary numbers
_STAND_IN_ROWS = {
    Domain.TOKENS: 3, Domain.OUTPUTS: 2, Domain.EMBEDS: 4, Domain.LOGITS: 1, Domain.FEATURES: 7, Domain.ENCODER: 5
}  # fmt: skip


class NotRecordable(Exception):
    """The forward does something that cannot be recorded, named in the message. It still runs op by op."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A stand-in for a tensor: elements of each row of a value, starting at `offset`. Only ops can use it."""

    value: Value
    row_shape: tuple[int, ...]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (_STAND_IN_ROWS[self.value.domain], *self.row_shape)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordable(f"{name!r} of a tensor, which is not an op")

    def _not_an_op(self, *_: object) -> NoReturn:
        raise NotRecordable("arithmetic on a tensor outside of an op")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __getitem__ = _not_an_op

    @classmethod
    def __torch_function__(cls, function: object, *_: object) -> NoReturn:
        raise NotRecordable(f"{getattr(function, '__name__', function)} of torch, which is not an op")


class RecordingOps:
    """`ForwardOps` that record their calls and compute nothing.

    It accepts the inputs and metadata (one object per KV group) of its own stand-in batch, `batch`, and no others.
    """

    def __init__(self, library: NativeLibrary, like: ForwardBatch) -> None:
        self._library = library
        self._calls: list[OpCall] = []
        self._checks: dict[IndexCheck | GroupCheck, None] = {}
        self._inputs: dict[str, Value] = {}
        # Groups may share one metadata object; copy it so that identity distinguishes them.
        metadata, of_outputs = (tuple(map(replace, groups)) for groups in (like.metadata, like.outputs.metadata))
        inputs = {name: self._input(name, given.tensor, given.domain) for name, given in like.inputs.items()}
        self.batch = ForwardBatch(
            token_ids=self._input("token_ids", like.token_ids, Domain.TOKENS).tensor,
            positions=self._input("positions", like.positions, Domain.TOKENS).tensor,
            metadata=metadata,
            outputs=OutputRows(self._input("output_index", like.outputs.index, Domain.OUTPUTS).tensor, of_outputs),
            logits_index=self._input("logits_index", like.logits_index, Domain.LOGITS).tensor,
            inputs=inputs,
            num_layers=like.num_layers,
        )
        self._groups = (RowGroup * len(metadata_of(self.batch)))()

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordable(f"{name!r} within a forward")

    def program(self, results: Tensor | Sequence[Tensor], threads: int) -> Program:
        """Return the recorded program, which computes `results`."""
        values: list[Value] = []
        for result in results if isinstance(results, (tuple, list)) else (results,):
            view = _as_view(result)
            if view.offset or view.row_shape != view.value.row_shape or view.value.name is not None:
                raise NotRecordable("a result that is an input, or a part of another value")
            values.append(view.value)
        calls = self._fused(values)
        return Program(
            self._library, threads, Recording(calls, values, self._inputs, self._groups, tuple(self._checks))
        )

    def _input(self, name: str, tensor: torch.Tensor, domain: Domain) -> Input:
        value = Value(tuple(tensor.shape[1:]), DTYPE_CODES[tensor.dtype], domain, name)
        self._inputs[name] = value
        return Input(cast(torch.Tensor, View(value, value.row_shape)), domain)

    def _record(self, op: Op, *args: object, **kwargs: object) -> object:
        arguments = op.bind(args, kwargs)
        call = self._op_call(op, arguments)
        self._calls.append(call)
        views = [View(value, value.row_shape) for value in call.outputs.values()]
        if len(views) > 1:
            return tuple(views)
        return views[0] if views else None

    def _op_call(self, op: Op, arguments: dict[str, object], outputs: Sequence[Value] = ()) -> OpCall:
        """outputs: the values to compute, if they exist already."""
        call = prepare_call(op, arguments, _facts, self._group_address)
        inputs: dict[str, tuple[Value, int]] = {}
        for name, declared in op.arguments.items():
            if isinstance(declared, Rows):
                view = _as_view(arguments[name])
                if declared.writes and view.value.name is not None:
                    raise NotRecordable(f"{op.name} changes an input of the batch")
                inputs[name] = (view.value, view.offset)
        self._check_rows(op, arguments, {name: value for name, (value, _) in inputs.items()})
        if not outputs:
            made: list[Value] = []
            for out in op.outputs.values():
                row_shape, dtype = call.output(out)
                below = None if out.below is None else call.shapes[out.below][-1]
                made.append(Value(row_shape, dtype, inputs[out.rows][0].domain, below=below))
            outputs = made
        return OpCall(op.name, call.record, inputs, dict(zip(op.outputs, outputs, strict=True)), arguments, call.kept)

    def _check_rows(self, op: Op, arguments: dict[str, object], values: dict[str, Value]) -> None:
        """Require that all rows are of one domain; add the checks to run before the program."""
        domains = {
            values[name].domain
            for name, declared in op.arguments.items()
            if isinstance(declared, Rows) and not declared.any_domain
        }
        if len(domains) > 1:
            raise NotRecordable(f"{op.name} of rows of different domains: {', '.join(d.name for d in sorted(domains))}")
        domain = domains.pop()
        for name, declared in op.arguments.items():
            if isinstance(declared, Rows) and declared.below is not None:
                table, indices = arguments[declared.below], values[name]
                limit = table.value.domain if isinstance(table, View) else cast(Tensor, table).shape[0]
                if indices.name is not None:
                    self._checks[IndexCheck(indices, limit)] = None
                elif isinstance(limit, Domain) or indices.below is None or indices.below > limit:
                    raise NotRecordable(f"{op.name}: {name} that is not an input of the batch")
            elif isinstance(declared, Group):
                group = self._group_index(arguments[name])
                of_group = Domain.TOKENS if group < len(self.batch.metadata) else Domain.OUTPUTS
                writes = declared.rows is Slots.WRITTEN
                wanted = (Domain.TOKENS, Domain.ENCODER) if writes else (of_group,)
                if domain not in wanted:
                    raise NotRecordable(f"{op.name} of {domain.name} rows with metadata of {wanted[0].name} rows")
                cache = None if declared.cache is None else cast(KVLayer, arguments[declared.cache])
                num_blocks = NO_CACHE if cache is None else cache.k.shape[0]
                whole = GroupCheck(group, domain, domain, num_blocks)
                if domain is Domain.ENCODER:  # the slots are those of cross attention, whose queries are tokens
                    self._checks[replace(whole, queries=None)] = None
                elif writes or whole not in self._checks:
                    self._checks[whole if writes else replace(whole, written=None)] = None

    def _view(self, op: Op, *args: object, **kwargs: object) -> object:
        assert op.slices is not None
        whole, *others = op.bind(args, kwargs).values()
        view = _as_view(whole)
        views = [View(view.value, (at.heads, at.dim), view.offset + at.offset) for at in op.slices(*others)]
        return tuple(views) if len(views) > 1 else views[0]

    def _group_index(self, metadata: object) -> int:
        for index, known in enumerate(metadata_of(self.batch)):
            if known is metadata:
                return index
        raise NotRecordable("attention metadata that is not the batch's")

    def _group_address(self, metadata: AttentionMetadata) -> int:
        return addressof(self._groups) + self._group_index(metadata) * sizeof(RowGroup)

    def _fused(self, results: Sequence[Value]) -> list[OpCall]:
        """Return the calls, with pairs named in FUSIONS fused if no other call reads the value between them."""
        uses: dict[Value, int] = {}
        for call in self._calls:
            for value, _ in call.inputs.values():
                uses[value] = uses.get(value, 0) + 1
        maker = {value: index for index, call in enumerate(self._calls) for value in call.outputs.values()}
        calls: list[OpCall | None] = list(self._calls)
        for index, call in enumerate(self._calls):
            between = next(iter(call.inputs.values()))[0]
            first = calls[maker[between]] if between in maker else None
            fused = None if first is None else FUSIONS.get((first.op, call.op))
            if first is None or fused is None or uses[between] != 1 or between in results:
                continue
            gated = next(iter(call.outputs.values())).row_elements < between.row_elements
            if gated and not _gates_whole_panels(first):
                continue
            op, arguments = OP_TABLE[fused], call.arguments | first.arguments
            arguments = {name: arguments[name] for name in op.arguments}
            calls[maker[between]] = self._op_call(op, arguments, list(call.outputs.values()))
            calls[index] = None
        return [call for call in calls if call is not None]


for _op in FORWARD_OPS.values():  # of the class: see NativeOps
    _method = RecordingOps._view if _op.slices is not None else RecordingOps._record
    setattr(RecordingOps, _op.name, partialmethod(_method, _op))


def record_forward(
    library: NativeLibrary,
    threads: int,
    forward: Callable[[ForwardOps, ForwardBatch, Sequence[KVLayer]], Tensor | Sequence[Tensor]],
    batch: ForwardBatch,
    kv: Sequence[KVLayer],
) -> Program:
    """Return the program of a forward, for batches with the named inputs and layers of `batch`, on the cache `kv`.

    Raises NotRecordable where it computes something outside of its ops.
    """
    recorder = RecordingOps(library, batch)
    return recorder.program(forward(cast(ForwardOps, recorder), recorder.batch, kv), threads)


def _as_view(value: object) -> View:
    if not isinstance(value, View):
        raise NotRecordable("a tensor that no recorded op made")
    return value


def _facts(name: str, value: object) -> RowsFacts:
    view = _as_view(value)
    return RowsFacts(view.shape, view.value.dtype, view.value.row_elements, dense=True)


def _gates_whole_panels(linear: OpCall) -> bool:
    """Return whether gate and up of a linear layer are whole panels of one form, as the fused kernels require."""
    weight = linear.arguments["weight"]
    return isinstance(weight, PackedWeight) and weight.next is None and weight.out_features // 2 % PANEL == 0
