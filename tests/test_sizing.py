"""What several ranks have room for: the smallest of what they measure, whichever rank it is in each respect."""

from pathlib import Path

from pagoda.base.config import EngineConfig
from pagoda.core.executor import Capacity, StepSize
from pagoda.engine_setup import resolve_engine
from pagoda.sizing import fit_measured
from pagoda.worker.memory import KVCapacity, smallest
from tests.engine.driver import write_tiny_llama

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
        Capacity("cuda:0 of a", 2 * GIB, 1 << 20),
        Capacity("cuda:0 of b", 3 * GIB, 1 << 20, 2, "steps of 2048 tokens do not fit"),
        Capacity("cuda:1 of b", 4 * GIB, 1 << 20, 1, "steps of 2048 tokens do not fit"),
    ]
    setup, capacity = fit_measured(setup, None, measured, sizes)
    assert setup.config.scheduler.max_num_batched_tokens == 512
    assert capacity.num_blocks == int(2 * GIB * setup.config.cache.gpu_memory_utilization) // (1 << 20) - 1
