"""The CPUs and threads that this process may use. Imports so little that every package can import it."""

import os
import re
from pathlib import Path

from pagoda.process.cgroups import cgroup_folders


def available_cpus(root: Path = Path("/")) -> int:
    """Return the number of physical cores this process may run on, limited by its cgroup's CPU quota; at least 1.

    Hyper-threads of one core count once: two threads on one core share the vector units that the kernels fill.
    root: the folder of /proc and /sys (for tests).
    """
    cores = len(_allowed_cores(root)) or os.cpu_count() or 1
    quota = _cgroup_cpus(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def cores_to_pin(threads: int, root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Return the CPUs of each of `threads` cores, or nothing if the system should place the threads.

    Threads are pinned only if they take every core. With cores to spare, or with a quota of time on shared cores, the
    system places them better: two engines that pin their threads would choose the same cores.
    """
    cores = _allowed_cores(root)
    quota = _cgroup_cpus(root)
    whole = quota is None or quota >= len(cores)
    return cores if whole and threads == len(cores) > 1 else []


def bind_to_cores(number: int, count: int, root: Path = Path("/")) -> int:
    """Keep this process, the `number`-th of `count` that compute at the same time, on its share of the cores.

    Cores are shared out by memory node: as many processes as nodes have a node each, if those are equally large. With
    fewer cores than processes, or with a quota of time on shared cores, the system places them.
    Return how many threads it should use.
    """
    cores, threads = _allowed_cores(root), available_cpus(root)
    if len(cores) < count or threads < len(cores):
        return max(1, threads // count)
    share = cores[len(cores) * number // count : len(cores) * (number + 1) // count]
    os.sched_setaffinity(0, [cpu for core in share for cpu in core])
    return len(share)


def describe_cpus(root: Path = Path("/")) -> str:
    """Describe how `available_cpus` got its result."""
    cores = _allowed_cores(root)
    if not cores:
        return f"{os.cpu_count()} CPUs"
    quota = _cgroup_cpus(root)
    limit = "no cgroup quota" if quota is None else f"cgroup quota of {quota:g}"
    nodes = num_memory_nodes(root)
    where = f" on {nodes} memory nodes" if nodes > 1 else ""
    return f"{len(cores)} cores of {sum(map(len, cores))} CPUs{where} by affinity, {limit}"


def num_memory_nodes(root: Path = Path("/")) -> int:
    """Return how many memory nodes have CPUs that this thread may run on; 1 where that is not known."""
    nodes = _memory_nodes(root)
    return len({nodes.get(core[0], 0) for core in _allowed_cores(root)}) or 1


def openmp_runtimes(root: Path = Path("/")) -> list[str]:
    """Return the paths of the OpenMP runtimes in this process. Several would compete for the cores."""
    maps = _read(root / "proc/self/maps") or ""
    return sorted(set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)[-.\w]*", maps)))


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the features of the first CPU that both it and the system support, as Linux names them; else nothing."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", _read(root / "proc/cpuinfo") or "", re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def _allowed_cores(root: Path) -> list[tuple[int, ...]]:
    """Return the CPUs that the affinity mask allows, by physical core; empty on systems other than Linux.

    Cores of one memory node are adjacent: so are the parts of a weight that its threads hold.
    """
    nodes = _memory_nodes(root)
    try:
        allowed = sorted(os.sched_getaffinity(0), key=lambda cpu: (nodes.get(cpu, 0), cpu))
    except AttributeError:
        return []
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault((siblings or str(cpu)).strip(), []).append(cpu)
    return [tuple(cpus) for cpus in cores.values()]


def _memory_nodes(root: Path) -> dict[int, int]:
    """Return the memory node of each CPU, as far as the system says."""
    nodes: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for part in (_read(folder / "cpulist") or "").strip().split(","):
            first, _, last = part.partition("-")
            if first:  # a node may have memory only
                nodes |= dict.fromkeys(range(int(first), int(last or first) + 1), int(folder.name[4:]))
    return nodes


def _cgroup_cpus(root: Path) -> float | None:
    """Return the CPU quota of the cgroup in CPUs, the minimum over it and its parents; None without a limit."""
    limits = [(_quota_v2 if is_v2 else _quota_v1)(folder) for folder, is_v2 in cgroup_folders("cpu", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return None if quota is None or period is None or int(quota) <= 0 else int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
