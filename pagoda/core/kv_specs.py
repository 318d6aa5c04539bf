"""What a model's layers ask of the KV cache, as plain values."""

from dataclasses import dataclass
from enum import Enum


class KVGroupKind(Enum):
    FULL = "full"  # attends to every earlier token
    WINDOW = "window"  # attends to the last `window` tokens, itself included
    CROSS = "cross"  # attends to the encoder's output; filled once, never grows


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token keeps in one layer: K [num_heads, key_dim] and V [num_heads, value_dim]."""

    num_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share one block table.

    All groups draw block ids from one pool. A block of any group holds `block_size` tokens of as many layers as the
    largest group has (`layers_per_block`), so blocks are interchangeable: the i-th layer of each group lives in
    the i-th KV tensor, at the block ids of its own group's table. A tensor has room for the largest shape.

    kind: what the layers attend to.   window: tokens, for WINDOW (0 otherwise).
    layers: indices of the attentions that keep KV, ascending; a model's layer may have several.
    shape: of their K and V.
    """

    kind: KVGroupKind = KVGroupKind.FULL
    window: int = 0
    layers: tuple[int, ...] = (0,)
    shape: KVShape = KVShape()


def layers_per_block(groups: tuple[KVGroupSpec, ...]) -> int:
    """How many layers' KV one pool block carries: the size of the largest group; 0 without groups."""
    return max((len(group.layers) for group in groups), default=0)
