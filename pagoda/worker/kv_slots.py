"""KV slots: the tensors that layers of several KV groups share. Does not import torch, for `pagoda plan`."""

from dataclasses import dataclass

from pagoda.base.dtypes import DTYPE_BYTES, WITH_SCALES
from pagoda.core.kv_specs import KVGroupSpec, KVShape, layers_per_block

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVSlot:
    """One K and one V tensor, shared by the i-th layers of all groups and as large as the largest of them needs.

    keys, values: elements per token.   scales: per token and tensor, in a cache of 8 bits.
    """

    keys: int
    values: int
    scales: int


def kv_slots(groups: tuple[KVGroupSpec, ...]) -> tuple[KVSlot, ...]:
    """Return the slots of a block: as many as the largest group has layers."""
    return tuple(
        KVSlot(
            keys=max(shape.num_heads * shape.key_dim for shape in shapes),
            values=max(shape.num_heads * shape.value_dim for shape in shapes),
            scales=max(shape.num_heads for shape in shapes),
        )
        for shapes in (
            [group.shape for group in groups if len(group.layers) > slot] for slot in range(layers_per_block(groups))
        )
    )


def kv_bytes_per_slot(slot: KVSlot, kv_dtype: str) -> int:
    """Return the bytes per token in one slot: K and V, and the scales of a cache of 8 bits."""
    scales = 2 * slot.scales * _SCALE_BYTES if kv_dtype in WITH_SCALES else 0
    return (slot.keys + slot.values) * DTYPE_BYTES[kv_dtype] + scales


def kv_bytes_per_token(groups: tuple[KVGroupSpec, ...], kv_dtype: str) -> int:
    """Return the bytes of a token's K and V in all layers, without padding between unequal groups."""
    return sum(len(group.layers) * kv_bytes_per_slot(_alone(group.shape), kv_dtype) for group in groups)


def kv_block_bytes(groups: tuple[KVGroupSpec, ...], kv_dtype: str, block_size: int) -> int:
    """Return the bytes per block, in all slots."""
    return block_size * sum(kv_bytes_per_slot(slot, kv_dtype) for slot in kv_slots(groups))


def _alone(shape: KVShape) -> KVSlot:
    return KVSlot(shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim, shape.num_heads)
