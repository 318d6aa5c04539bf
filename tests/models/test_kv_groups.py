"""How attentions are put into KV groups."""

import pytest

from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVShape, by_pool, layers_per_block
from pagoda.layers.kv import KVDeclaration, group_kv


def declared(window: int) -> KVDeclaration:
    return KVDeclaration(KVGroupKind.WINDOW if window else KVGroupKind.FULL, window, KVShape(2, 16, 16))


STATE = KVDeclaration(KVGroupKind.STATE, STATE_WINDOW, KVShape(2, 96, 0))


def pattern(num_layers: int, period: int, window: int = 512) -> tuple[int, ...]:
    return tuple(window if (layer + 1) % period else 0 for layer in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ((0,) * 30, [30]),
        ((7,) * 5, [5]),
        (pattern(18, 6), [3] * 6),  # Gemma 3 270M
        (pattern(26, 6), [4] * 5 + [2] + [4]),  # 1B: 22 + 4
        (pattern(34, 6), [5] * 5 + [4] + [5]),  # 4B: 29 + 5
        (pattern(4, 2), [2, 2]),
        ((0, 5, 9), [1, 1, 1]),
        (pattern(62, 31), [2] * 31),  # no size gives 8 groups; the least waste then
    ],
    ids=str,
)
def test_sizes(windows: tuple[int, ...], sizes: list[int]):
    groups = group_kv([declared(window) for window in windows])
    assert sorted(len(group.layers) for group in groups) == sorted(sizes)
    assert layers_per_block(groups) == max(sizes)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
        assert group.kind is (KVGroupKind.WINDOW if group.window else KVGroupKind.FULL)


def test_all_equal_states_are_one_group():
    """They do not make the groups of attention smaller, and have a pool of their own: LFM2-1.2B."""
    attention = {2, 5, 8, 10, 12, 14}
    groups = group_kv([declared(0) if layer in attention else STATE for layer in range(16)])
    assert {group.kind: len(group.layers) for group in groups} == {KVGroupKind.STATE: 10, KVGroupKind.FULL: 6}
    assert [layers_per_block(pool) for pool in by_pool(groups)] == [6, 10]
    windows = group_kv([STATE, *map(declared, pattern(18, 6)), STATE])
    assert sorted(len(group.layers) for group in windows) == [2, *[3] * 6]
    assert layers_per_block(group_kv([STATE] * 5)) == 5
