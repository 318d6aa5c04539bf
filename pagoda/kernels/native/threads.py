"""How many threads this process may really use, and whose. Standard library only, so that every floor can ask."""

import os
import re
from pathlib import Path


def available_cpus(root: Path = Path("/")) -> int:
    """Physical cores this process may run on, no more than its cgroup's CPU quota allows; at least 1.

    Hyper-threads of one core count once: two threads on one core share the vector units that the kernels fill.
    root: where /proc and /sys hang, for tests.
    """
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)
    cores = {_core_of(cpu, root) for cpu in allowed}
    quota = _cgroup_cpus(root)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def describe_cpus(root: Path = Path("/")) -> str:
    """What `available_cpus` went by, for people."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return f"{os.cpu_count()} CPUs"
    cores = len({_core_of(cpu, root) for cpu in allowed})
    quota = _cgroup_cpus(root)
    limit = "no cgroup quota" if quota is None else f"cgroup quota of {quota:g}"
    return f"{cores} cores of {len(allowed)} CPUs by affinity, {limit}"


def openmp_runtimes(root: Path = Path("/")) -> list[str]:
    """The OpenMP runtimes mapped into this process, by path. More than one would fight for the cores."""
    maps = _read(root / "proc/self/maps") or ""
    return sorted(set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)[-.\w]*", maps)))


def _core_of(cpu: int, root: Path) -> str:
    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return (_read(siblings) or str(cpu)).strip()


def _cgroup_cpus(root: Path) -> float | None:
    """CPUs' worth of time the cgroup grants, the tightest of it and its parents; None without a limit."""
    limits: list[float] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = root / "sys/fs/cgroup" / controllers, _quota_v1
        else:
            continue
        folder = mount / path.strip("/")
        for place in (folder, *folder.parents):
            limit = read(place)
            if limit is not None:
                limits.append(limit)
            if place == mount:
                break
    return min(limits, default=None)


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
