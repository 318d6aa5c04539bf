"""What each of several replicas computes with: GPUs of its own, or a share of the cores and of the memory."""

import os
from pathlib import Path

import pytest

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.replica_share import take_share
from pagoda.assembly.sizing import size_cache
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.worker.calls import Capacity
from pagoda.worker.devices.cpu import CpuDevice
from tests.engine.driver import write_tiny_llama

GIB = 1 << 30


def config_of(**options: object) -> EngineConfig:
    return EngineConfig.from_options(**{"data_parallel_size": 2, **options})


def machine(root: Path, num_cores: int = 0, num_gpus: int = 0) -> Path:
    """The files of /sys and /dev of a machine whose first cores are those of this process."""
    (root / "dev").mkdir()
    for number in range(num_gpus):
        (root / "dev" / f"nvidia{number}").touch()
    (root / "dev/nvidiactl").touch()
    for cpu in range(num_cores):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(str(cpu))
    return root


def test_each_replica_sees_its_own_gpus(tmp_path: Path) -> None:
    root = machine(tmp_path, num_gpus=4)
    for visible, expected in ((None, ["0,1", "2,3"]), ("7,5,3,1,0", ["7,5", "3,1"])):
        found: list[str] = []
        for number in range(2):
            environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            config = config_of(tensor_parallel_size=2)
            assert take_share(config, number, environ, root) == config
            found.append(environ["CUDA_VISIBLE_DEVICES"])
        assert found == expected
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 with 3 workers each needs 6 GPUs, .* has 4 .*'cpu'"):
        take_share(config_of(tensor_parallel_size=3), 0, {}, root)
    environ = {}
    assert take_share(EngineConfig(), 0, environ, root) == EngineConfig()
    assert environ == {}


def test_replicas_divide_the_cores_and_what_is_given_is_what_each_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, allowed = machine(tmp_path, num_cores=5), {0, 1, 2, 3, 4}
    for number, cores in ((0, {0, 1}), (1, {2, 3, 4})):
        mask = set(allowed)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, mask=mask: mask)

        def narrow(_: int, cpus: list[int], mask: set[int] = mask) -> None:
            mask.intersection_update(cpus)

        monkeypatch.setattr(os, "sched_setaffinity", narrow)
        for options in ({}, {"threads": 4}, {"tensor_parallel_size": 2}):
            assert take_share(config_of(**options), number, {}, root).parallel.threads == options.get("threads")
            assert mask == cores
            mask.update(allowed)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # fewer cores than replicas
    assert take_share(config_of(), 1, {}, root).parallel.threads in (None, 1)


def test_replicas_divide_the_memory_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda _: GIB)
    model = str(write_tiny_llama(tmp_path))
    alone, two = (resolve_engine(config_of(model=model, device="cpu", data_parallel_size=size)) for size in (1, 2))
    for measured in ([], [Capacity("host", GIB, (1 << 12,))]):
        pools = [size_cache(setup, measured).num_blocks for setup in (alone, two)]
        assert pools[0] // 2 - 100 < pools[1] <= pools[0] // 2


def test_a_recording_is_of_one_engine() -> None:
    with pytest.raises(ConfigError, match="record goes with one engine, and data_parallel_size=2"):
        check_settings(config_of(record="/tmp/record"))
