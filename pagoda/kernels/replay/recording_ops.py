"""RecordingOps: an `Ops` that computes nothing and writes down what it was asked for."""

from collections.abc import Sequence

import numpy as np
import torch

from pagoda.core.scheduler_output import LogprobColumns
from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, KVLayer
from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.linear.packed_bytes import PANEL
from pagoda.kernels.linear.quantize import QuantizedWeight
from pagoda.kernels.native.dtypes import DTYPE_CODES
from pagoda.kernels.native_ops import NativeOps, check_page_shape
from pagoda.kernels.replay.program import Gate, Op, Program, Step, Value, View
from pagoda.ops.tensor import ExpertWeights, LinearWeight


class NotRecordable(Exception):
    """The forward does something that a layer program cannot hold; the message says what. It still runs op by op."""


class RecordingOps:
    """Runs a model's forward on tensors without data (device "meta"), and keeps a step for each op it calls.

    The tensors have the shapes of `batch`, so shapes are checked as the model runs; each stands for a value of the
    program. That reads the batch's own token ids, positions, metadata (one object per KV group) and tail, no others.
    """

    name = "recording"

    def __init__(self, ops: NativeOps, dtype: torch.dtype, batch: ForwardBatch) -> None:
        self._ops, self._dtype, self._batch = ops, dtype, batch
        self._metadata = batch.metadata + batch.tail.metadata
        self._steps: list[Step] = []
        self._views: dict[int, View] = {}
        self._kept: list[object] = []  # tensors whose ids or addresses are in use

    def program(self, result: torch.Tensor) -> Program:
        """What was recorded; it will return the value that `result` stands for."""
        view = self._view(result)
        if view.offset or result.numel() != self._rows(view.value.tail) * view.value.width:
            raise NotRecordable("the result is a part of another value")
        ops = self._ops
        groups = len(self._batch.metadata)
        return Program(ops.library, ops.threads, self._steps, view.value, groups, self._dtype, self._kept)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        raise NotRecordable("prepare_linear within a forward")

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        raise NotRecordable("prepare_quantized_linear within a forward")

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if not isinstance(weight, PackedWeight):
            raise NotRecordable(f"a linear layer of {type(weight).__name__}")
        assert x.shape == (self._rows(self._view(x).value.tail), weight.in_features)
        assert weight.dtype in (None, self._dtype)
        self._kept.append(weight)
        return self._record(Op.LINEAR, [x], [weight.out_features], pointers=[weight.address], numbers=[Gate.NONE])[0]

    def moe(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        top_k: int,
        renormalize: bool,
    ) -> torch.Tensor:
        raise NotRecordable("moe, which has no native kernel yet")

    def prepare_experts(self, experts: Sequence[LinearWeight]) -> ExpertWeights:
        raise NotRecordable("prepare_experts within a forward")

    def logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        raise NotRecordable("logits within a forward")

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if scale != 1.0:
            scale = torch.tensor(scale, dtype=table.dtype).item()
        self._check_is(token_ids, self._batch.token_ids, "token ids")
        assert table.is_contiguous()
        hidden = table.shape[1]
        return self._record(
            Op.EMBEDDING, [], [hidden], pointers=[self._address(table)], numbers=[hidden], factors=[scale]
        )[0]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
        vectors, dim = (1, x.shape[1]) if x.dim() == 2 else x.shape[1:]
        out = self._record(
            Op.RMS_NORM, [x], [vectors * dim], pointers=[self._norm_weight(weight)],
            numbers=[vectors, dim, dim, unit_offset], factors=[eps],
        )[0]  # fmt: skip
        return self._stand_in(x.shape, self._view(out))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = self._whole_width(x, residual)
        out, total = self._record(
            Op.ADD_RMS_NORM, [x, residual], [width, width], pointers=[self._norm_weight(weight)],
            numbers=[1, 0, width, unit_offset], factors=[eps],
        )  # fmt: skip
        return out, total

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        width = self._whole_width(x, residual)
        return self._record(Op.ADD, [x, residual], [width], numbers=[width])[0]

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_is(positions, self._batch.positions, "positions")
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        self._check_whole(x)
        _, heads, head_dim = x.shape
        tables = [self._address(cos), self._address(sin)]
        out = self._record(Op.ROTARY, [x], [heads * head_dim], pointers=tables, numbers=[heads, head_dim])[0]
        return self._stand_in(x.shape, self._view(out))

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
        self._write(k, v, cache, metadata, [])

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        self._check_is(positions, self._batch.positions, "positions")
        self._write(k, v, cache, metadata, [self._address(cos), self._address(sin)])
        return self._rotate(q, cos, sin)

    def _write(
        self, k: torch.Tensor, v: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata, tables: list[int | None]
    ) -> None:
        check_page_shape(k.shape[2], cache.k.shape[2])
        self._check_whole(k, v)
        self._record(
            Op.WRITE_KV, [k, v], [], group=self._group(metadata), pointers=[*self._pages(cache), *tables],
            numbers=[k.shape[1], k.shape[2], DTYPE_CODES[cache.k.dtype]],
        )  # fmt: skip

    def copy_blocks(self, cache: KVLayer, pairs: Sequence[tuple[int, int]]) -> None:
        raise NotRecordable("copy_blocks within a forward")

    def attention(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        _, heads, head_dim = q.shape
        check_page_shape(head_dim, cache.k.shape[2])
        group = self._group(metadata)
        if (group >= len(self._batch.metadata)) != self._view(q).value.tail:
            raise NotRecordable("queries of the batch with the metadata of its tail, or the reverse")
        return self._record(
            Op.ATTENTION, [q], [heads * head_dim], group=group, pointers=self._pages(cache),
            numbers=[heads, cache.k.shape[1], head_dim, DTYPE_CODES[cache.k.dtype], window], factors=[scale, softcap],
        )[0]  # fmt: skip

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(gate_up, Gate.SILU)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(gate_up, Gate.GELU_TANH)

    def _gated(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        """A step of its own, or the end of the linear layer before it: gate and up then never reach memory.

        The fused layer rounds both to the compute dtype first, as the step of its own finds them.
        """
        width = self._whole_width(gate_up) // 2
        before = self._steps[-1]
        made = self._view(gate_up).value
        if before.op is Op.LINEAR and before.outputs == [made] and width % PANEL == 0:
            value = Value(width, made.tail)
            before.outputs, before.numbers = [value], [gate]
            del self._views[id(gate_up)]  # whoever still wants it cannot be recorded
            return self._stand_in((self._rows(value.tail), width), View(value))
        return self._record(Op.GATED, [gate_up], [width], numbers=[width, gate])[0]

    def split_qkv(
        self, qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        view = self._view(qkv)
        assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
        sizes = (num_heads, num_kv_heads, num_kv_heads)
        first = (0, num_heads * head_dim, (num_heads + num_kv_heads) * head_dim)
        q, k, v = (
            self._stand_in((qkv.shape[0], heads, head_dim), View(view.value, view.offset + offset))
            for heads, offset in zip(sizes, first, strict=True)
        )
        return q, k, v

    def select_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        self._check_is(index, self._batch.tail.index, "selected rows")
        self._check_whole(x)
        width = x[0].numel()
        out = self._record(Op.SELECT, [x], [width], numbers=[width], tail=True)[0]
        return self._stand_in((out.shape[0], *x.shape[1:]), self._view(out))

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        width = self._whole_width(x)
        return self._record(Op.SOFTCAP, [x], [width], numbers=[width], factors=[cap])[0]

    def best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotRecordable("best_tokens within a forward")

    def top_logprobs(self, logits: torch.Tensor, chosen: np.ndarray, k: int) -> LogprobColumns:
        raise NotRecordable("top_logprobs within a forward")

    def sample(
        self,
        logits: torch.Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        uniform: np.ndarray,
        best: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        raise NotRecordable("sample within a forward")

    def _record(
        self,
        op: Op,
        inputs: Sequence[torch.Tensor],
        widths: Sequence[int],
        group: int = 0,
        pointers: Sequence[int | None] = (),
        numbers: Sequence[int] = (),
        factors: Sequence[float] = (),
        tail: bool = False,
    ) -> list[torch.Tensor]:
        """tail: the step makes values of the tail; so it does when its inputs are."""
        views = [self._view(x) for x in inputs]
        of_tail = {view.value.tail for view in views}
        if len(of_tail) > 1:
            raise NotRecordable("the whole batch and its tail in one op")
        outputs = [Value(width, tail or True in of_tail) for width in widths]
        self._steps.append(Step(op, views, outputs, group, pointers, numbers, factors))
        return [self._stand_in((self._rows(value.tail), value.width), View(value)) for value in outputs]

    def _rows(self, tail: bool) -> int:
        return (self._batch.tail.index if tail else self._batch.token_ids).shape[0]

    def _check_whole(self, *tensors: torch.Tensor) -> None:
        if any(self._view(tensor).value.tail for tensor in tensors):
            raise NotRecordable("the batch's tail where all of it is wanted")

    def _stand_in(self, shape: Sequence[int], view: View) -> torch.Tensor:
        """A new tensor without data that stands for `view`."""
        tensor = torch.empty(tuple(shape), dtype=self._dtype, device="meta")
        self._kept.append(tensor)
        self._views[id(tensor)] = view
        return tensor

    def _view(self, tensor: torch.Tensor) -> View:
        if id(tensor) not in self._views:
            raise NotRecordable("a tensor that no recorded op made")
        return self._views[id(tensor)]

    def _whole_width(self, *tensors: torch.Tensor) -> int:
        """The width of tensors [T, width] that are all of their value."""
        for tensor in tensors:
            view = self._view(tensor)
            if view.offset or tensor.shape != (self._rows(view.value.tail), view.value.width):
                raise NotRecordable("a part of a value where all of it is wanted")
        return tensors[0].shape[1]

    def _check_is(self, given: torch.Tensor, known: torch.Tensor, what: str) -> None:
        if given is not known:
            raise NotRecordable(f"{what} that are not the batch's")

    def _norm_weight(self, weight: torch.Tensor) -> int:
        assert weight.dtype == self._dtype
        return self._address(weight)

    def _address(self, tensor: torch.Tensor) -> int:
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _pages(self, cache: KVLayer) -> list[int | None]:
        self._kept.append(cache)
        tensors = (cache.k, cache.v, cache.k_scale, cache.v_scale)
        return [None if tensor is None else tensor.data_ptr() for tensor in tensors]

    def _group(self, metadata: AttentionMetadata) -> int:
        for index, known in enumerate(self._metadata):
            if known is metadata:
                return index
        raise NotRecordable("attention metadata that is not the batch's")
