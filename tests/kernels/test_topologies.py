"""Which cores threads and ranks get, and which parts of a weight, on machines that this one is not."""

import os
from ctypes import addressof, c_int64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagoda.kernels.native.abi import PackedLinear
from pagoda.kernels.native.threads import available_cpus, bind_to_cores, cores_to_pin, describe_cpus


@dataclass(frozen=True)
class Machine:
    """Cores by memory node, each with its CPUs (hyper-threads); without those that the affinity mask excludes."""

    nodes: tuple[tuple[tuple[int, ...], ...], ...]
    excluded: frozenset[int] = frozenset()
    quota: float | None = None

    def cores(self) -> list[tuple[tuple[int, ...], int]]:
        """Return each core's allowed CPUs and node."""
        of_nodes = [(core, node) for node, cores in enumerate(self.nodes) for core in cores]
        left = [(tuple(cpu for cpu in core if cpu not in self.excluded), node) for core, node in of_nodes]
        return [(core, node) for core, node in left if core]

    def write(self, root: Path) -> None:
        files = {"proc/self/cgroup": "0::/a\n"}
        for node, cores in enumerate(self.nodes):
            files[f"sys/devices/system/node/node{node}/cpulist"] = ranges(sorted(cpu for core in cores for cpu in core))
            for core in cores:
                for cpu in core:
                    files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = ranges(list(core))
        files["sys/devices/system/node/node9/cpulist"] = "\n"  # memory without CPUs
        if self.quota is not None:
            files["sys/fs/cgroup/a/cpu.max"] = f"{int(self.quota * 100000)} 100000\n"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)


def ranges(cpus: list[int]) -> str:
    """As Linux writes CPUs: 0-3,8."""
    parts: list[str] = []
    for cpu in cpus:
        if not parts or int(parts[-1].split("-")[-1]) != cpu - 1:
            parts.append(str(cpu))
        else:
            parts[-1] = f"{parts[-1].split('-')[0]}-{cpu}"
    return ",".join(parts) + "\n"


MACHINES = {
    "desktop: 8 cores, SMT neighbours": Machine((tuple((2 * i, 2 * i + 1) for i in range(8)),)),
    "EPYC: 64 cores, SMT after all": Machine((tuple((i, i + 64) for i in range(64)),)),
    "2 x 32: nodes one after the other": Machine(
        (tuple((i, i + 64) for i in range(32)), tuple((i, i + 64) for i in range(32, 64)))
    ),
    "2 x 24: nodes take turns": Machine(
        (tuple((i, i + 48) for i in range(0, 48, 2)), tuple((i, i + 48) for i in range(1, 48, 2)))
    ),
    "2 x 64 without SMT": Machine((tuple((i,) for i in range(64)), tuple((i,) for i in range(64, 128)))),
    "2 x 16, holes": Machine(
        (tuple((i, i + 32) for i in range(16)), tuple((i, i + 32) for i in range(16, 32))),
        frozenset({0, 5, 37, 20, 52}),
    ),
    "a container of 6 CPUs of 16": Machine((tuple((i, i + 16) for i in range(16)),), quota=6.0),
}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = MACHINES[request.param]
    made.write(tmp_path)
    allowed = {cpu for core, _ in made.cores() for cpu in core}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    return made


def test_a_thread_for_every_core_is_pinned_node_after_node(machine: Machine, tmp_path: Path) -> None:
    threads = available_cpus(tmp_path)
    if machine.quota is not None:
        assert threads == machine.quota
        assert cores_to_pin(threads, tmp_path) == []
        return
    assert [(core, node) for core, node in sorted(machine.cores(), key=lambda of: (of[1], of[0]))] == [
        (core, node_of(machine, core)) for core in cores_to_pin(threads, tmp_path)
    ]
    assert threads == len(machine.cores())
    assert cores_to_pin(threads - 1, tmp_path) == []
    said = f"{threads} cores of {sum(len(core) for core, _ in machine.cores())} CPUs"
    said += " on 2 memory nodes by affinity" if len(machine.nodes) == 2 else " by affinity"
    assert said in describe_cpus(tmp_path)


def test_two_ranks_have_a_node_each(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(set(cpus)))
    threads = [bind_to_cores(rank, 2, tmp_path) for rank in range(2)]
    assert sum(threads) == available_cpus(tmp_path)
    if machine.quota is not None:
        assert bound == []
        return
    first, second = bound
    assert not first & second
    assert first | second == {cpu for core, _ in machine.cores() for cpu in core}
    if len(machine.nodes) == 2 and not machine.excluded:
        for number, cpus in enumerate(bound):
            assert cpus == {cpu for core in machine.nodes[number] for cpu in core}


@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 8192), (49152, 576)]
)
@pytest.mark.parametrize("in_pairs", [False, True])
def test_all_of_a_weight_has_an_owner_and_nodes_have_adjacent_parts(
    native: Any, machine: Machine, tmp_path: Path, shape: tuple[int, int], in_pairs: bool
) -> None:
    """Parts are equal but for one segment, and each panel is first touched by a thread of the node that computes it."""
    threads, cores = available_cpus(tmp_path), cores_to_pin(available_cpus(tmp_path), tmp_path)
    nodes = [node_of(machine, core) for core in cores] or [0] * threads
    record, plan = PackedLinear(None, None, *shape, in_pairs=in_pairs), (c_int64 * 3)()
    native.library["linear_plan"](addressof(record), threads, addressof(plan))
    panels, segments, used = plan
    assert panels == shape[0] // 32 // (2 if in_pairs else 1)
    assert segments in (1, -(-shape[1] // 2048))
    assert used == min(threads, panels * segments)
    parts = [range(panels * segments * i // used, panels * segments * (i + 1) // used) for i in range(used)]
    assert [unit for part in parts for unit in part] == list(range(panels * segments))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    computing = [nodes[i] for i, part in enumerate(parts) for _ in part]  # by unit
    assert computing == sorted(computing)
    crossing = sum(computing[panel * segments] != computing[(panel + 1) * segments - 1] for panel in range(panels))
    assert crossing <= 1  # a panel that two nodes share is in the memory of one


def node_of(machine: Machine, core: tuple[int, ...]) -> int:
    return next(node for allowed, node in machine.cores() if allowed == core)
