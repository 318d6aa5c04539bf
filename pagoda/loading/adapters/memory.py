"""The memory of LoRA adapters, from the model's declarations. No torch: `pagoda plan` uses it."""

from pagoda.base.dtypes import DTYPE_BYTES
from pagoda.kernels.linear.forms import FLOATS, HeldAs
from pagoda.layers.lora_targets import lora_targets
from pagoda.models.base import Model


def adapter_memory(model: Model, max_rank: int, dtype: str, packed: bool) -> int:
    """Return the bytes of an adapter of rank `max_rank` that adapts all that can be adapted.

    dtype: the compute dtype.   packed: in the native kernels' panels; else as dense matrices.
    """
    held, element = HeldAs(FLOATS[dtype]), DTYPE_BYTES[dtype]
    stacked_ranks: dict[int, int] = {}  # of the parts of a fused weight, whose `a` are one weight
    inputs: dict[int, int] = {}
    total = 0
    for target in lora_targets(model).values():
        rows = len(target.rows)
        total += held.packed_bytes(rows, max_rank) if packed else rows * max_rank * element
        key = id(target.parameter)
        stacked_ranks[key] = stacked_ranks.get(key, 0) + max_rank + (max_rank % 2 if packed else 0)
        inputs[key] = target.inputs
    for key, rank in stacked_ranks.items():
        total += held.packed_bytes(rank, inputs[key]) if packed else rank * inputs[key] * element
    return total
