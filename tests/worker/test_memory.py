import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig, DebugConfig
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.server_config import ServerLimits
from pagoda.core.kv import STATE_WINDOW, KVGroupKind, KVGroupSpec, KVShape, KVSizing
from pagoda.core.kv.sizing import blocks_per_snapshot
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.memory import (
    KVCapacity,
    KVSlot,
    available_memory,
    bytes_of_blocks,
    embeds_memory,
    kv_block_bytes,
    kv_bytes_per_token,
    kv_slots,
    memory_limit,
    plan_capacity,
    require_host_memory,
    state_bytes,
)

GIB = 1024**3
FULL = (KVGroupSpec(layers=tuple(range(30)), shape=KVShape(3, 64, 64)),)  # SmolLM2-135M
SCHEDULER = SchedulerOptions()


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, available_gib: int = 8) -> Path:
    write(root, proc__meminfo=f"MemTotal: 99 kB\nMemAvailable: {available_gib * 1024 * 1024} kB\n")
    return root


def test_the_limit_is_what_the_machine_and_its_groups_allow(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    write(tmp_path, proc__meminfo=f"MemTotal: {16 * 1024 * 1024} kB\nMemAvailable: 99 kB\n")
    assert memory_limit(tmp_path) == 16 * GIB
    write(tmp_path, proc__self__cgroup="0::/\n")
    write(tmp_path, sys__fs__cgroup__memory_dot_max=f"{2 * GIB}", sys__fs__cgroup__memory_dot_current=f"{GIB}")
    assert memory_limit(tmp_path) == 2 * GIB


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path)) == 8 * GIB


def test_files_that_are_mapped_are_not_available(tmp_path: Path) -> None:
    """Weights that this engine or another one reads from a file: the system would give up their pages."""
    counted = f"MemAvailable: {8 * 1024 * 1024} kB\nMapped: {3 * 1024 * 1024} kB\nShmem: {1024 * 1024} kB\n"
    write(tmp_path, proc__meminfo=counted)
    assert available_memory(tmp_path) == 6 * GIB
    write(tmp_path, proc__meminfo=counted.replace("Shmem: ", "Shmem: 9"))  # which was not available anyway
    assert available_memory(tmp_path) == 8 * GIB


def test_v2_the_tightest_ancestor_decides(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root, proc__self__cgroup="0::/outer/inner\n")
    inner, outer = "sys__fs__cgroup__outer__inner__memory_dot_", "sys__fs__cgroup__outer__memory_dot_"
    write(root, **{f"{inner}max": "max\n", f"{inner}current": "5\n"})
    write(root, **{f"{outer}max": f"{4 * GIB}\n", f"{outer}current": f"{3 * GIB}\n"})
    assert available_memory(root) == GIB
    write(root, **{f"{outer}stat": f"anon 1\ninactive_file {GIB}\n"})  # page cache that the kernel would free
    assert available_memory(root) == 2 * GIB


@pytest.mark.parametrize(
    ("is_v2", "prefix", "mapped"), [(True, "", "file_mapped"), (False, "total_", "total_mapped_file")]
)
def test_files_that_are_mapped_are_not_available_in_a_container(
    is_v2: bool, prefix: str, mapped: str, tmp_path: Path
) -> None:
    """Weights that are read from a file for the first time are among its inactive pages."""
    root = machine(tmp_path)
    write(root, proc__self__cgroup="0::/\n" if is_v2 else "4:memory:/\n")
    base = "sys__fs__cgroup__memory_dot_" if is_v2 else "sys__fs__cgroup__memory__memory_dot_"
    limit, used = ("max", "current") if is_v2 else ("limit_in_bytes", "usage_in_bytes")
    write(root, **{f"{base}{limit}": f"{4 * GIB}", f"{base}{used}": f"{3 * GIB}"})

    def left(inactive: int, active: int, of_mapped: int, shared: int = 0) -> int:
        counts = {"inactive_file": inactive, "active_file": active, "shmem": shared}
        lines = "".join(f"{prefix}{name} {count * GIB}\n" for name, count in counts.items())
        write(root, **{f"{base}stat": f"{lines}{mapped} {of_mapped * GIB}\n"})
        return available_memory(root) // GIB

    assert left(2, 0, 0) == 3
    assert left(2, 0, 2) == 1
    assert left(2, 1, 2) == 2
    assert left(1, 2, 2) == 2  # those that are mapped have become active
    assert left(2, 0, 2, shared=2) == 3  # what is mapped is shared memory, and in neither
    assert left(1, 0, 2) == 1


def test_v2_inside_a_container_the_mount_is_our_group(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root, proc__self__cgroup="0::/../../pod123\n")
    write(root, sys__fs__cgroup__memory_dot_max=f"{2 * GIB}", sys__fs__cgroup__memory_dot_current=f"{GIB}")
    assert available_memory(root) == GIB


@pytest.mark.parametrize(("controllers", "mount"), [("memory", "memory"), ("hugetlb,memory", "memory,hugetlb")])
def test_v1(controllers: str, mount: str, tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root, proc__self__cgroup=f"7:cpu,cpuacct:/\n4:{controllers}:/docker/abc\n1:name=systemd:/x\n")
    base = f"sys__fs__cgroup__{mount}__docker__abc__memory_dot_"
    write(root, **{f"{base}limit_in_bytes": f"{3 * GIB}", f"{base}usage_in_bytes": f"{GIB}"})
    write(root, **{f"{base}stat": f"total_inactive_file {GIB // 2}\n"})
    assert available_memory(root) == 2 * GIB + GIB // 2
    write(root, **{f"{base}limit_in_bytes": "9223372036854771712"})  # v1's way to say "none"
    assert available_memory(root) == 8 * GIB


def test_nothing_readable_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        available_memory(tmp_path)


def test_memory_of_smollm2() -> None:
    assert kv_bytes_per_token(FULL, "bfloat16") == 23040
    assert kv_bytes_per_token(FULL, "int8") == 30 * 2 * 3 * (64 + 4)
    assert kv_block_bytes(FULL, "bfloat16", 16) == 16 * 23040


def test_a_slot_has_room_for_the_largest_shape() -> None:
    """Two full layers with few wide keys, three window layers with many narrow heads."""
    wide, narrow = KVShape(2, 128, 64), KVShape(8, 16, 16)
    groups = (KVGroupSpec(layers=(0, 3), shape=wide), KVGroupSpec(KVGroupKind.WINDOW, 32, (1, 2, 4), narrow))
    assert kv_slots(groups) == (KVSlot(256, 128, 8), KVSlot(256, 128, 8), KVSlot(128, 128, 8))
    assert kv_block_bytes(groups, "bfloat16", 4) == 4 * 2 * (2 * (256 + 128) + 128 + 128)
    assert kv_block_bytes(groups, "int8", 4) == 4 * (2 * (256 + 128) + 128 + 128 + 3 * 2 * 8 * 4)
    assert kv_bytes_per_token(groups, "bfloat16") == 2 * (2 * (256 + 128) + 3 * (128 + 128))


def test_blocks_of_states_are_counted_by_themselves() -> None:
    """Ten states of 4,096 elements next to six layers of attention, LFM2-1.2B: a snapshot for every block."""
    state, attention = KVShape(2, 2048, 0), KVShape(8, 64, 64)
    states = KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, tuple(range(6, 16)), state)
    groups = (KVGroupSpec(layers=tuple(range(6)), shape=attention), states)
    assert bytes_of_blocks(groups, "bfloat16", 16) == (6 * 2 * 2 * 512 * 16, 10 * 2 * 4096)
    assert bytes_of_blocks((states,), "float32", 16) == (10 * 4 * 4096,)
    assert blocks_per_snapshot(groups, 16) == 1
    assert kv_bytes_per_token(groups, "bfloat16") == 6 * 2 * 2 * 512
    assert state_bytes(groups, "bfloat16") == 10 * 2 * 4096
    assert state_bytes(groups[:1], "bfloat16") == 0


def granite_4_tiny() -> tuple[KVGroupSpec, ...]:
    """Four layers of attention and 36 of Mamba-2."""
    mamba = KVShape(3, 3328, 0, (48, 128, 64))
    return (
        KVGroupSpec(layers=tuple(range(4)), shape=KVShape(4, 128, 128)),
        KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, tuple(range(4, 40)), mamba),
    )


def test_large_states_are_kept_every_512_tokens() -> None:
    groups = granite_4_tiny()
    assert state_bytes(groups, "bfloat16") == 36 * (2 * 3 * 3328 + 4 * 48 * 128 * 64)
    assert blocks_per_snapshot(groups, 16) == 512 // 16
    assert blocks_per_snapshot(groups[1:], 24) == 32  # 768 tokens


def test_memory_is_divided_between_attention_and_states() -> None:
    """Three states for each sequence and those of the longest chunk, then one for every 512 tokens of attention; but no
    more bytes than attention has, unless one sequence needs them."""
    groups, cache = granite_4_tiny(), CacheConfig(kv_cache_memory=16 * GIB)
    few = SchedulerOptions(max_num_batched_tokens=2048, max_num_seqs=4)
    of_block, of_state = bytes_of_blocks(groups, "bfloat16", 16)
    found = plan_capacity(groups, cache, "bfloat16", 8192, 0, few)
    held = 2048 // 512 + 2 + 2 + 1
    affordable = found.num_blocks * of_block // of_state
    assert abs(found.num_states - affordable) <= 1 + affordable // 100
    assert 16 * GIB - 2 * (of_block + of_state) < found.device_bytes <= 16 * GIB
    small = KVSizing.of(groups, 16, 8192, few)
    assert small.pool_sizes(100) == (100, held)
    assert small.pool_sizes(0) == (0, 0)
    lfm2 = (
        KVGroupSpec(layers=tuple(range(6)), shape=KVShape(8, 64, 64)),
        KVGroupSpec(KVGroupKind.STATE, STATE_WINDOW, tuple(range(6, 16)), KVShape(2, 2048, 0)),
    )
    assert KVSizing.of(lfm2, 16, 8192, few).pool_sizes(1000) == (1000, 3 * 4 + 1000 + 2064 // 16 + 1)


def test_a_model_of_states_alone_has_as_long_requests_as_it_may() -> None:
    groups = granite_4_tiny()[1:]
    (of_state,) = bytes_of_blocks(groups, "bfloat16", 16)
    few = SchedulerOptions(max_num_batched_tokens=512, max_num_seqs=4)
    found = plan_capacity(groups, CacheConfig(kv_cache_memory=12 * of_state), "bfloat16", 1 << 17, 0, few)
    assert (found.num_blocks, found.block_size, found.num_states, found.max_tokens) == (11, 16, 0, 1 << 17)
    with pytest.raises(CapacityError, match="kv_cache_memory"):
        plan_capacity(groups, CacheConfig(kv_cache_memory=3 * of_state), "bfloat16", 1 << 17, 0, few)


def test_pool_from_bytes_share_or_count() -> None:
    block = 23040 * 16
    from_bytes = plan_capacity(FULL, CacheConfig(kv_cache_memory=101 * block), "bfloat16", 1600, 0, SCHEDULER)
    assert (from_bytes.num_blocks, from_bytes.max_tokens) == (100, 1600)
    assert from_bytes.pool_bytes == 100 * block
    share = CacheConfig(gpu_memory_utilization=0.25, swap_space=1)
    from_share = plan_capacity(FULL, share, "bfloat16", 8192, 4 * GIB, SCHEDULER)
    assert from_share.num_blocks == GIB // block - 1
    assert from_share.num_host_blocks == GIB // block
    tiny = DebugConfig(num_blocks=3, num_host_blocks=2)
    from_count = plan_capacity(FULL, CacheConfig(), "bfloat16", 8192, 0, SCHEDULER, tiny)
    assert (from_count.num_blocks, from_count.num_host_blocks) == (3, 2)


@pytest.mark.parametrize(
    "given", [{"kv_cache_memory": 10**30}, {"kv_cache_memory": 2**30, "swap_space": 1e30}], ids=["cache", "swap"]
)
def test_an_absurd_size_is_named(given: dict[str, Any]) -> None:
    name = list(given)[-1]
    with pytest.raises(CapacityError, match=f"{name} would make .* blocks; at most"):
        plan_capacity(FULL, CacheConfig(**given), "bfloat16", 1024, 0, SCHEDULER)


def test_pools_larger_than_the_machine_are_refused_with_the_size_that_fits() -> None:
    def check(cache: int, swap_space: float = 0, is_on_host: bool = True, limit: int | None = 8 * GIB) -> str:
        config = CacheConfig(kv_cache_memory=cache, swap_space=swap_space)
        capacity = plan_capacity(FULL, config, "bfloat16", 1024, 0, SCHEDULER)
        try:
            require_host_memory(capacity, config, limit, GIB, is_on_host)
        except CapacityError as error:
            return str(error)
        return ""

    assert check(7 * GIB) == ""
    said = check(900 * GIB)
    assert f"kv_cache_memory={900 * GIB}" in said
    assert f"set kv_cache_memory={7 * GIB} or less" in said
    assert check(900 * GIB, is_on_host=False) == ""  # a GPU refuses it itself
    assert "set swap_space=3.0 or less" in check(4 * GIB, swap_space=4)
    assert check(4 * GIB, swap_space=3) == ""
    assert check(900 * GIB, limit=None) == ""
    assert check(900 * GIB, limit=GIB // 2) == ""  # the weights alone do not fit, which is refused before
    with pytest.raises(CapacityError, match="a KV cache of 9000000 blocks .* does not fit"):
        require_host_memory(KVCapacity(9_000_000, 0, 16, 1 << 20, 1), CacheConfig(), 8 * GIB, GIB, True)


def test_the_limits_of_a_server_bound_its_prompt_embeddings() -> None:
    """An element in a body takes two bytes or more, as base64; it is held twice in float32, and by the worker."""
    element = base64.b64encode(bytes(2 * 3_000))
    elements = 3_000 * (256 << 20) // len(element)
    found = embeds_memory(576, "bfloat16", ServerLimits())
    assert (found.host, found.device) == (8 * elements, 2 * elements)
    assert found.total == 960 << 20  # as docs/howto/prompt-embeddings.md says
    tokens = ServerLimits(max_queued_tokens=1000)
    assert embeds_memory(576, "float32", tokens).total == 1000 * 576 * 12
    one_body = ServerLimits(max_body_bytes=512 << 20)  # a body alone is admitted
    assert embeds_memory(576, "float32", one_body).device == 3 * (512 << 20) // 8 * 4


def test_too_little_memory_names_what_would_fit() -> None:
    config = CacheConfig(kv_cache_memory=101 * 23040 * 16)
    with pytest.raises(CapacityError) as caught:
        plan_capacity(FULL, config, "bfloat16", 8192, 0, SCHEDULER)
    message = str(caught.value)
    assert "max_model_len=1600 or less" in message
    needed = int(message.split("kv_cache_memory=")[-1].split()[0])
    enough = plan_capacity(FULL, CacheConfig(kv_cache_memory=needed), "bfloat16", 8192, 0, SCHEDULER)
    assert enough.max_tokens >= 8192
    with pytest.raises(CapacityError):
        plan_capacity(FULL, CacheConfig(kv_cache_memory=needed - 1), "bfloat16", 8192, 0, SCHEDULER)
    plan_capacity(FULL, config, "bfloat16", 1600, 0, SCHEDULER)
    with pytest.raises(CapacityError, match="gpu_memory_utilization"):
        plan_capacity(FULL, CacheConfig(), "bfloat16", 8192, 1000, SCHEDULER)


def test_window_groups_need_less() -> None:
    groups = (KVGroupSpec(KVGroupKind.FULL, 0, (0,)), KVGroupSpec(KVGroupKind.WINDOW, 32, (1,)))
    sizing = KVSizing.of(groups, 16, 160, SchedulerOptions(max_num_batched_tokens=16, max_num_seqs=1))
    assert sizing.blocks_for_request(160) == (
        10 + 4,
    )  # 31 tokens of the window, 16 being computed, and a part of a block
    assert sizing.blocks_for_request(16) == (2,)


@pytest.mark.parametrize("budget", [64, 2048])
@pytest.mark.parametrize("kinds", [(512,), (0, 512), (0, 24, 100)])
def test_start_up_promises_what_admission_keeps(budget: int, kinds: tuple[int, ...]) -> None:
    """The smallest pool that start-up accepts for a length admits and runs a prompt of that length."""
    groups = tuple(
        KVGroupSpec(KVGroupKind.WINDOW if window else KVGroupKind.FULL, window, (layer,))
        for layer, window in enumerate(kinds)
    )
    scheduler, length = SchedulerOptions(max_num_batched_tokens=budget, max_num_seqs=8), 8192
    block_bytes = kv_block_bytes(groups, "bfloat16", 16)
    with pytest.raises(CapacityError) as caught:
        plan_capacity(groups, CacheConfig(kv_cache_memory=block_bytes), "bfloat16", length, 0, scheduler)
    needed = int(str(caught.value).split("kv_cache_memory=")[-1].split()[0])
    capacity = plan_capacity(groups, CacheConfig(kv_cache_memory=needed), "bfloat16", length, 0, scheduler)
    assert capacity.num_blocks == needed // block_bytes - 1
    one = Scheduler(scheduler, CacheConfig(watermark=0.0), groups, capacity.num_blocks, length, VirtualClock())
    one.add_request(Request("a", np.zeros(length - 1, np.int32), SamplingParams(max_tokens=1)))
    for _ in range(-(-length // budget)):
        output = one.schedule()
        assert not output.preempted
        count = len(output.sample_rows)
        tokens = np.ones((count, 1), np.int32)
        outputs = one.update_from_output(output, ModelRunnerOutput(output.step, tokens, np.ones(count, np.int32)))
        assert not [finish for of_client in outputs.values() for finish in of_client.ends if finish.message]
    assert not one.has_unfinished_requests()


def test_a_window_of_512_needs_161_blocks_everywhere() -> None:
    groups = (KVGroupSpec(KVGroupKind.WINDOW, 512, (0,)),)
    assert KVSizing.of(groups, 16, 8192, SchedulerOptions()).blocks_for_request(8192) == (161,)


def test_a_model_without_kv_takes_no_memory_for_it() -> None:
    capacity = plan_capacity((), CacheConfig(), "float32", 512, 0, SCHEDULER)
    assert (capacity.pool_bytes, capacity.num_host_blocks, capacity.max_tokens) == (0, 0, 512)
    assert kv_block_bytes((), "float32", 16) == 0
    assert CacheEngine((), 16, capacity.num_blocks, 0, torch.float32, CpuDevice()).layers == []
