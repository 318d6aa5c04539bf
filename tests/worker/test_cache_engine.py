import numpy as np
import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec, KVShape
from pagoda.worker.cache_engine import CacheEngine, HostBlocks
from pagoda.worker.devices import Device
from pagoda.worker.devices.cpu import CpuDevice
from tests.device_under_test import ON_CPU, DeviceUnderTest
from tests.worker.hand_made import step
from tests.worker.lagging_device import LaggingDevice

CPU = torch.device("cpu")


def pairs(*of: tuple[int, int]) -> np.ndarray:
    return np.array(of, np.int32)


def engine(
    dtype: torch.dtype = torch.float32,
    groups: tuple[KVGroupSpec, ...] = (KVGroupSpec(layers=(0, 1), shape=KVShape(2, 4, 4)),),
    device: Device | None = None,
    on: DeviceUnderTest = ON_CPU,
) -> CacheEngine:
    make_blocks = on.ops().make_device_blocks
    cache = CacheEngine(groups, 3, 6, 4, dtype, device or on.made, make_blocks)
    for number, layer in enumerate(cache.layers):
        for block in range(7):
            for nth, plane in enumerate((layer.k, layer.v, layer.k_scale, layer.v_scale)):
                if plane is not None:
                    plane[block] = 20 * number + block + nth * 10 if dtype != torch.int8 else block + nth
    return cache


@pytest.mark.parametrize("device", [CpuDevice, LaggingDevice])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_step_moves_out_then_in_then_copies(dtype: torch.dtype, device: type[CpuDevice], on: DeviceUnderTest) -> None:
    if device is LaggingDevice:
        on.must_be_a_cpu("a GPU's copies are late by themselves")
    cache = engine(dtype, device=device() if on.device.type == "cpu" else None, on=on)
    before = [plane.clone() for layer in cache.layers for plane in (layer.k, layer.v)]
    # Block 1 is parked, host block 2 does not exist yet when it is swapped in: it is what 2 held. 5 is copied from it.
    cache.apply(
        step(1, [], swap_out=pairs((1, 3), (2, 1)), swap_in=pairs((3, 2), (1, 4)), copies=pairs((2, 5), (4, 6)))
    )
    for plane, old in zip((p for layer in cache.layers for p in (layer.k, layer.v)), before, strict=True):
        assert torch.equal(plane[1], old[1])
        assert torch.equal(plane[2], old[1])
        assert torch.equal(plane[4], old[2])
        assert torch.equal(plane[5], old[1])
        assert torch.equal(plane[6], old[2])
        assert torch.equal(plane[3], old[3])
    if dtype == torch.int8:
        for layer in cache.layers:
            assert layer.k_scale is not None
            assert layer.k_scale[:, 0, 0].tolist() == [2, 3, 3, 5, 4, 3, 4]


def test_copies_of_one_step_read_before_they_write(on: DeviceUnderTest) -> None:
    cache = engine(on=on)
    cache.copy(pairs((1, 2), (2, 1)))
    assert cache.layers[0].k[:4, 0, 0, 0].tolist() == [0, 2, 1, 3]


def test_groups_share_tensors() -> None:
    shape = KVShape(1, 4, 4)
    groups = (KVGroupSpec(KVGroupKind.WINDOW, 8, (0, 2), shape), KVGroupSpec(KVGroupKind.FULL, 0, (1,), shape))
    cache = CacheEngine(groups, 4, 3, 0, torch.float32, CpuDevice())
    assert cache.layers[0].k.data_ptr() == cache.layers[1].k.data_ptr()
    assert all(plane.is_contiguous() for layer in cache.layers for plane in (layer.k, layer.v))
    assert cache.layers[0].k.data_ptr() != cache.layers[2].k.data_ptr()
    assert cache.layers[0].k.shape == (4, 1, 4, 4)
    with pytest.raises(ConfigError):
        CacheEngine((KVGroupSpec(layers=(0, 2)),), 4, 3, 0, torch.float32, CpuDevice())


def test_pools_start_as_zeros_and_untouched_memory_costs_nothing() -> None:
    groups = (KVGroupSpec(shape=KVShape(8, 128, 128)),)
    big = CacheEngine(groups, 16, 200_000, 0, torch.float32, CpuDevice())  # 26 GB of addresses
    assert big.layers[0].k[123_456].abs().sum() == 0


def test_groups_of_different_shapes_share_memory_block_by_block(on: DeviceUnderTest) -> None:
    """What one group writes in a block changes no other block of the other group; whole blocks are moved."""
    wide, narrow = KVShape(1, 8, 4), KVShape(2, 2, 2)
    groups = (KVGroupSpec(layers=(0,), shape=wide), KVGroupSpec(KVGroupKind.WINDOW, 8, (1,), narrow))
    cache = CacheEngine(groups, 4, 5, 5, torch.float32, on.made, on.ops().make_device_blocks)
    first, second = cache.layers
    assert (first.k.shape, first.v.shape) == ((6, 1, 4, 8), (6, 1, 4, 4))
    assert (second.k.shape, second.v.shape) == ((6, 2, 4, 2), (6, 2, 4, 2))
    first.k[2], second.k[3], first.k[4] = 2.0, 3.0, 4.0
    assert [float(block.sum()) for block in first.k] == [0, 0, 64, 48, 128, 0]
    assert [float(block.min()) for block in second.k] == [0, 0, 2, 3, 4, 0]
    cache.apply(step(1, [], swap_out=pairs((4, 1)), swap_in=pairs((1, 5)), copies=pairs((3, 1))))
    assert bool((first.k[5] == 4).all())
    assert bool((second.k[1] == 3).all())


def test_states_have_a_pool_of_their_own(on: DeviceUnderTest) -> None:
    """Its blocks follow those of the pages, on the device (5) and on the host (4); windows and matrices move."""
    pages = KVGroupSpec(layers=(0, 2), shape=KVShape(2, 2, 2))
    states = KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, (1, 3), KVShape(2, 5, 0, (3, 4, 2)))
    cache = CacheEngine((pages, states), 4, 5, 4, torch.bfloat16, on.made, on.ops().make_device_blocks, 3, 2)
    of_states = [cache.layers[layer] for layer in states.layers]
    assert {(layer.k.shape, layer.v.shape) for layer in of_states} == {((4, 2, 1, 5), (4, 3, 4, 2))}
    assert {(layer.k.dtype, layer.v.dtype) for layer in of_states} == {(torch.bfloat16, torch.float32)}
    for number, layer in enumerate(of_states):
        layer.k[1], layer.v[1] = number + 1.0, number + 3.0
    cache.layers[0].k[1] = 9.0
    cache.apply(
        step(1, [], swap_out=pairs((1, 2), (6, 5)), swap_in=pairs((5, 8), (2, 3)), copies=pairs((6, 7), (1, 4)))
    )
    for block in (2, 3):
        assert [float(layer.k[block].mean()) for layer in of_states] == [1, 2]
        assert [float(layer.v[block].mean()) for layer in of_states] == [3, 4]
    assert [float(layer.v[0].sum()) for layer in of_states] == [0, 0]
    assert [float(cache.layers[0].k[block].mean()) for block in range(6)] == [0, 9, 0, 9, 9, 0]


def test_blocks_that_go_out_may_be_written_at_once(on: DeviceUnderTest) -> None:
    """Their copy comes late: what is overwritten meanwhile, on the device, is not what is kept."""
    cache = engine(device=LaggingDevice() if on.device.type == "cpu" else None, on=on)
    old = cache.layers[1].v[2].clone()
    cache.swap_out(pairs((2, 3)))
    for layer in cache.layers:
        layer.k[2], layer.v[2] = -1.0, -1.0
    cache.swap_in(pairs((3, 5)))
    assert torch.equal(cache.layers[1].v[5], old)


@pytest.mark.parametrize("elements", [1, 2, 3, 4, 8, 12])
def test_any_number_of_bytes_moves(elements: int, on: DeviceUnderTest) -> None:
    before = [torch.randint(-128, 128, (9, count), dtype=torch.int8) for count in (elements, 24, 2 * elements)]
    planes = [plane.to(on.device, copy=True) for plane in before]
    blocks = on.ops().make_device_blocks(planes)
    host = HostBlocks(blocks, 7, on.made)
    sources, parked, targets = (np.array(ids, np.int32) for ids in ([3, 1, 7, 8], [2, 3, 6, 5], [4, 5, 2, 1]))
    host.store(blocks.read(sources), parked)
    blocks.write(targets, host.load(parked))
    for plane, old in zip((plane.cpu() for plane in planes), before, strict=True):
        assert torch.equal(plane[targets], old[sources])
        assert torch.equal(plane[[0, 3, 6, 7, 8]], old[[0, 3, 6, 7, 8]])
