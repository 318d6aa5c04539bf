"""make_forward: the forward pass of a model that suits its device and kernels."""

from collections.abc import Mapping

from pagoda.kernels.low_rank.table import FillableLowRank
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.models.base import Model
from pagoda.worker.devices import Device
from pagoda.worker.forward_pass import EagerForward, ForwardPass, ReplayedForward
from pagoda.worker.graphed_forward import GraphedForward


def make_forward(
    model: Model,
    ops: Ops,
    device: Device,
    max_rows: int,
    max_len: int,
    max_query_len: int,
    tables: Mapping[int, FillableLowRank] | None = None,
) -> ForwardPass:
    """Return the fastest forward pass there is.

    max_rows, max_len: of the table of its rows.   max_query_len: most new tokens of a row in a step that is small
    enough for a graph.   tables: of LoRA adapters, by the id of the weight they adapt.
    """
    capture = device.make_capture(ops)
    if capture is not None and model.kv_groups:
        return GraphedForward(model, ops, max_rows, max_len, device.device, capture, tables, max_query_len)
    if isinstance(ops, NativeOps):
        return ReplayedForward(model, ops, tables)
    return EagerForward(model, ops, tables)
