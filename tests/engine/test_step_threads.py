"""Which CPUs the threads of an engine process may use."""

import os
from pathlib import Path

import pytest

from pagoda.base.config import EngineConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.kernels.native.threads import available_cpus, cores_to_pin
from tests.engine.byte_llama import write_byte_llama
from tests.engine.clients.engine_in_process import run_engine
from tests.generate import generate

THREADS = available_cpus()


@pytest.mark.skipif(not cores_to_pin(THREADS), reason="no threads are pinned: one core, or a quota on shared ones")
@pytest.mark.parametrize("async_scheduling", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_only_the_threads_that_compute_steps_are_pinned(async_scheduling: bool, tmp_path: Path) -> None:
    """Not those that fill masks, compile grammars, publish events, wait for results, hash the model's files or serve
    libraries, wherever they were started.
    """
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    config = EngineConfig.from_options(
        model=str(write_byte_llama(tmp_path / "llama")),
        max_model_len=128,
        kv_cache_memory="4MiB",
        kernels="native",
        threads=THREADS,
        async_scheduling=async_scheduling,
        kv_events_config=events,
    )

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        choices = StructuredOutputsParams(choice=["yes", "no"])
        params = SamplingParams(n=2, max_tokens=5, structured_outputs=choices)
        outputs = [one async for one in generate(llm, [5, 6], params, "a", kind=OutputKind.CUMULATIVE)]
        assert {one.text for one in outputs[-1].outputs} <= {"yes", "no"}
        assert client.engine_pid is not None
        masks = [os.sched_getaffinity(int(task)) for task in os.listdir(f"/proc/{client.engine_pid}/task")]
        everything = os.sched_getaffinity(0)
        pinned = [mask for mask in masks if mask != everything]
        assert len(masks) > len(pinned) + 4  # what serves a grammar has started
        assert sorted(map(tuple, map(sorted, pinned))) == sorted(cores_to_pin(THREADS))

    run_engine(work, ProcessClient(config), config)
