"""What a model's attentions store in the KV cache, and which of them share a block table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from pagoda.core.kv import KVGroupKind, KVGroupSpec, KVShape
from pagoda.layers.module import Module, walk

_MAX_GROUPS = 8  # each group costs a block table; beyond this, unused places in the last groups cost less


@dataclass(frozen=True, slots=True)
class KVDeclaration:
    """The KV of one attention.

    kind: an attention without KV declares None instead.
    window: tokens, 0 for full and cross.   shape: of K and V, or of a state.
    """

    kind: KVGroupKind
    window: int
    shape: KVShape


@dataclass(frozen=True, slots=True)
class KVPlace:
    """index: into the KV layers of a forward.   group: into the batch's metadata."""

    index: int = 0
    group: int = 0


class KeepsKV(Protocol):
    """An attention or a recurrent layer: declares its KV and receives its place."""

    kv: KVDeclaration | None
    place: KVPlace


def place_kv(root: Module) -> tuple[KVGroupSpec, ...]:
    """Group the attentions of a tree and set the place of each; a layer may have several.

    `layers` of a group counts the attentions that declare KV, in the order of the tree.
    """
    keepers = _keepers(root)
    groups = group_kv([keeper.kv for keeper in keepers if keeper.kv is not None])
    _set_places(keepers, groups)
    return groups


def place_kv_of_stage(root: Module, whole: tuple[KVGroupSpec, ...]) -> tuple[KVGroupSpec, ...]:
    """Place the attentions that a stage has, in groups that use the block tables of those of the whole tree, `whole`.

    Each group gets its share of the stage's layers of its kind, so that a block is as small as it can be.
    """
    keepers = _keepers(root)
    kinds = [KVDeclaration(group.kind, group.window, group.shape) for group in whole]
    groups = list[KVGroupSpec]()
    for number, group in enumerate(whole):
        same_kind = [other for other, kind in enumerate(kinds) if kind == kinds[number]]
        layers = [index for index, keeper in enumerate(keepers) if keeper.kv == kinds[number]]
        size = -(-len(layers) // len(same_kind))
        first = same_kind.index(number) * size
        groups.append(replace(group, layers=tuple(layers[first : first + size])))
    _set_places(keepers, groups)
    return tuple(groups)


def with_shapes_of(root: Module, groups: tuple[KVGroupSpec, ...]) -> tuple[KVGroupSpec, ...]:
    """Return the groups of a tree with the shapes that its attentions have now."""
    kept = [keeper.kv for keeper in _keepers(root)]
    shapes = {index: kv.shape for index, kv in enumerate(kept) if kv is not None}
    return tuple(replace(group, shape=shapes[group.layers[0]]) if group.layers else group for group in groups)


def _keepers(root: Module) -> list[KeepsKV]:
    """Return the attentions of a tree that declare KV, in its order."""
    # Not isinstance, which takes 20 us for each module.
    return [cast(KeepsKV, module) for _, module in walk(root) if isinstance(getattr(module, "kv", None), KVDeclaration)]


def _set_places(keepers: Sequence[KeepsKV], groups: Sequence[KVGroupSpec]) -> None:
    for number, group in enumerate(groups):
        for index in group.layers:
            keepers[index].place = KVPlace(index, number)


def group_kv(declared: Sequence[KVDeclaration]) -> tuple[KVGroupSpec, ...]:
    """Group KV layers with equal declarations, into groups of equal size if possible; all equal states are one group.

    A block has room for as many layers as the largest group has, so a smaller group wastes the difference. Of all sizes
    that give at most 8 groups, take the one with the least waste, and of those the largest. Attentions without KV are
    in no group.
    """
    if not declared:
        return ()
    kinds: dict[KVDeclaration, list[int]] = {}
    for layer, kind in enumerate(declared):
        kinds.setdefault(kind, []).append(layer)
    divided = {kind: layers for kind, layers in kinds.items() if kind.kind is not KVGroupKind.STATE}
    smallest = min(map(len, divided.values()), default=0)
    if len(divided) <= 1:
        size = smallest
    else:
        most = _MAX_GROUPS - len(kinds) + len(divided)
        size = min(range(1, smallest + 1), key=lambda s: (_num_groups(divided, s) > most, _waste(divided, s), -s))
    return tuple(
        KVGroupSpec(kind.kind, kind.window, tuple(layers[at : at + step]), kind.shape)
        for kind, layers in kinds.items()
        for step in [size if kind in divided else len(layers)]
        for at in range(0, len(layers), step)
    )


def _num_groups(kinds: dict[KVDeclaration, list[int]], size: int) -> int:
    return sum(-(-len(layers) // size) for layers in kinds.values())


def _waste(kinds: dict[KVDeclaration, list[int]], size: int) -> int:
    return sum(-len(layers) % size for layers in kinds.values())
