"""How a model's layers share block tables."""

from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec

_MAX_GROUPS = 8  # each group costs a block table; beyond this, unfilled places in the last groups cost less


def group_layers(layer_windows: tuple[int, ...]) -> tuple[KVGroupSpec, ...]:
    """KV groups of layers with the same window, of one size where that is possible.

    A block carries as many layers as the largest group has, so a smaller group wastes the difference. Of all sizes
    that give at most 8 groups the one with the fewest wasted places is taken, the largest of those.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)
    smallest = min(len(layers) for layers in kinds.values())
    if len(kinds) == 1:
        size = smallest
    else:
        size = min(range(1, smallest + 1), key=lambda s: (_num_groups(kinds, s) > _MAX_GROUPS, _waste(kinds, s), -s))
    return tuple(
        KVGroupSpec(KVGroupKind.WINDOW if window else KVGroupKind.FULL, window, tuple(layers[at : at + size]))
        for window, layers in kinds.items()
        for at in range(0, len(layers), size)
    )


def _num_groups(kinds: dict[int, list[int]], size: int) -> int:
    return sum(-(-len(layers) // size) for layers in kinds.values())


def _waste(kinds: dict[int, list[int]], size: int) -> int:
    return sum(-len(layers) % size for layers in kinds.values())
