"""KV slots: the tensors that the layers of several KV groups share. No torch: `pagoda plan` sizes the cache with it."""

from dataclasses import dataclass

from pagoda.base.dtypes import DTYPE_BYTES
from pagoda.core.kv_specs import KVGroupSpec, KVShape, layers_per_block

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVSlot:
    """One K and one V tensor, shared by the i-th layers of all groups; the largest of them decides their size.

    keys, values: elements per token.   scales: per token and tensor, in an int8 cache.
    """

    keys: int
    values: int
    scales: int


def kv_slots(groups: tuple[KVGroupSpec, ...]) -> tuple[KVSlot, ...]:
    """The slots of a block, as many as the largest group has layers."""
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
    """Bytes of one token in one slot: K and V, with the scales of an int8 cache."""
    scales = 2 * slot.scales * _SCALE_BYTES if kv_dtype == "int8" else 0
    return (slot.keys + slot.values) * DTYPE_BYTES[kv_dtype] + scales


def kv_bytes_per_token(groups: tuple[KVGroupSpec, ...], kv_dtype: str) -> int:
    """Bytes that a token's K and V take in all layers, without what groups of unequal shape or size leave unused."""
    return sum(len(group.layers) * kv_bytes_per_slot(_alone(group.shape), kv_dtype) for group in groups)


def kv_block_bytes(groups: tuple[KVGroupSpec, ...], kv_dtype: str, block_size: int) -> int:
    """Bytes of one block of the pool, in all slots."""
    return block_size * sum(kv_bytes_per_slot(slot, kv_dtype) for slot in kv_slots(groups))


def _alone(shape: KVShape) -> KVSlot:
    return KVSlot(shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim, shape.num_heads)
