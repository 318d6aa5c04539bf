"""What several ranks have room for: the smallest of what they measure, whichever rank it is in each respect."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.assembly.engine_setup import options_of, resolve_engine
from pagoda.assembly.sizing import encoder_in_memory, fit_cache, fit_measured, size_cache, weights_in_memory
from pagoda.base.abbreviate import human_bytes
from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError
from pagoda.worker.calls import Capacity, StepSize
from pagoda.worker.memory import KVCapacity, kv_block_bytes, smallest
from tests.engine.driver import write_tiny_llama
from tests.models.tiny import save
from tests.models.tiny_vision import make_vision

GIB = 1 << 30


def test_every_pool_has_as_many_blocks_as_fit_on_all_ranks() -> None:
    """Stages differ in the bytes of a block: one has least room for them, another makes fewest of the swap space."""
    ranks = [KVCapacity(90, 60, 16, 800, 1440), KVCapacity(100, 50, 16, 1000, 1600)]
    assert smallest(ranks) == KVCapacity(90, 50, 16, 1000, 1440)
    assert smallest(ranks[:1]) == ranks[0]


def test_steps_and_pools_are_those_of_the_devices_with_least_room(tmp_path: Path) -> None:
    """Here a device has room for the largest step, and less for pools next to it than the one that has not."""
    setup = resolve_engine(EngineConfig.for_engine(model=str(write_tiny_llama(tmp_path)), device="cpu"))
    sizes = [StepSize(256, 2048), StepSize(256, 1024), StepSize(256, 512)]
    measured = [
        Capacity("cuda:0 of a", 2 * GIB, (1 << 20,)),
        Capacity("cuda:0 of b", 3 * GIB, (1 << 20,), 2, "steps of 2048 tokens do not fit"),
        Capacity("cuda:1 of b", 4 * GIB, (1 << 20,), 1, "steps of 2048 tokens do not fit"),
    ]
    setup, capacity = fit_measured(setup, None, measured, sizes)
    assert setup.config.scheduler.max_num_batched_tokens == 512
    assert capacity.num_blocks == int(2 * GIB * setup.config.cache.gpu_memory_utilization) // (1 << 20) - 1


def test_weights_larger_than_memory_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them would end in a kill by the system. With a given KV cache, what others have now does not count."""
    options: dict[str, object] = {"model": str(write_tiny_llama(tmp_path)), "device": "cpu", "max_model_len": 64}
    weights = weights_in_memory(resolve_engine(EngineConfig.from_options(**options)))

    def plan(free: int, limit: int | None, cache: int | None) -> str:
        monkeypatch.setattr("pagoda.worker.devices.cpu.CpuDevice.free_bytes", lambda self: free)
        monkeypatch.setattr("pagoda.assembly.sizing.memory_limit", lambda: limit)
        try:
            fit_cache(resolve_engine(EngineConfig.from_options(**options, kv_cache_memory=cache)))
        except CapacityError as error:
            return str(error)
        return ""

    less, more, cache = weights - 1000, 64 * weights, 16 * weights
    numbers = f"take about {human_bytes(weights)}, and this machine has {human_bytes(less)} for them"
    assert f"{numbers}; quantization='int8' would fit" in plan(less, more, None)
    assert numbers in plan(less, less, cache)
    assert "take a smaller model" in plan(less // 8, more, None)
    assert plan(less, more, cache) == plan(less, None, cache) == plan(more, more, None) == ""


def test_images_take_memory_by_the_largest_that_their_processing_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_pixels of preprocessor_config.json bounds what reaches the encoder, and so what is planned for it."""
    monkeypatch.setattr("pagoda.worker.devices.cpu.CpuDevice.free_bytes", lambda self: 8 * GIB)
    monkeypatch.setattr("pagoda.assembly.sizing.memory_limit", lambda: 8 * GIB)
    folder = save(make_vision("qwen2.5-vl"), tmp_path)
    options: dict[str, object] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "gpu_memory_utilization": 1.0}
    config = EngineConfig.from_options(model=str(folder), device="cpu", **options)
    planned: list[tuple[int, int, int]] = []
    for max_pixels in (64 * 1000, 64 * 100):
        stated = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": max_pixels}
        (folder / "preprocessor_config.json").write_text(json.dumps({**stated, "patch_size": 4, "merge_size": 2}))
        setup = resolve_engine(config)
        media, budget = encoder_in_memory(setup), options_of(setup).encoder_budget
        assert budget == setup.largest_item
        assert media.outputs == 4 * budget * 96 * 4
        planned.append((setup.largest_item, media.scratch, size_cache(setup).pool_bytes + media.total))
    (large, large_scratch, all_of_it), (small, small_scratch, as_much) = planned
    assert large == setup.max_model_len == 256
    assert 100 <= small < 200
    assert small_scratch < large_scratch
    assert abs(all_of_it - as_much) < 1 << 17, "the KV cache has the rest, to a block"


def test_a_lowered_max_model_len_leaves_the_encoder_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.assembly.sizing.memory_limit", lambda: 8 * GIB)
    folder = save(make_vision("qwen2.5-vl"), tmp_path)
    stated = json.loads((folder / "config.json").read_text())
    for part in (stated, stated["text_config"]):
        part["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(stated))
    options: dict[str, object] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "gpu_memory_utilization": 1.0}
    setup = resolve_engine(EngineConfig.from_options(model=str(folder), device="cpu", **options))
    assert setup.max_model_len == 8192
    per_token = kv_block_bytes(setup.groups, setup.kv_dtype, 16) // 16
    # It is sized without the tables of its positions.
    free = weights_in_memory(replace(setup, max_model_len=1)) + encoder_in_memory(setup).total + 4096 * per_token
    free += setup.device.margin_bytes
    monkeypatch.setattr("pagoda.worker.devices.cpu.CpuDevice.free_bytes", lambda self: free)
    fitted, capacity = fit_cache(setup)
    assert capacity.pool_bytes <= 4096 * per_token
    assert 4000 < fitted.max_model_len <= 4096


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_tier_in_memory_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_replicas: int) -> None:
    """Replicas share it, and what engines that were killed have left of it is not free any more."""
    folder, free, tier = tmp_path / "host", 8 * GIB, 2 * GIB
    monkeypatch.setattr("pagoda.base.kv_tier._HOST_FOLDER", str(folder))
    monkeypatch.setattr("pagoda.worker.devices.cpu.CpuDevice.free_bytes", lambda self: free)
    monkeypatch.setattr("pagoda.assembly.sizing.memory_limit", lambda: 8 * GIB)
    options = {"model": str(write_tiny_llama(tmp_path)), "device": "cpu", "gpu_memory_utilization": 1.0}

    def pool(**more: object) -> int:
        config = EngineConfig.from_options(**options, data_parallel_size=num_replicas, **more)  # type: ignore[arg-type]
        return num_replicas * size_cache(resolve_engine(config)).pool_bytes

    without, with_tier = pool(), pool(kv_tier="host=2GiB")
    assert abs(without - with_tier - tier) < 1 << 17
    folder.mkdir()
    (folder / "record").write_bytes(bytes(1 << 20))
    free -= 1 << 20
    assert abs(pool(kv_tier="host=2GiB") - with_tier) < 1 << 17
    with pytest.raises(CapacityError, match="set kv_cache_memory="):
        pool(kv_tier="host=2GiB", kv_cache_memory=7 * GIB // num_replicas)
