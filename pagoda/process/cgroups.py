"""Where the limits of this process's control groups (cgroups) are written."""

from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """Return the folders of this process's cgroup and its parents that may limit it, and whether they are v2.

    controller: "cpu" or "memory", of v1, where each has cgroups of its own. They are mounted in a folder that is named
    after it, or after it and those that share it, in any order.
    root: the folder of /proc and /sys (for tests).   Folders may not exist.
    """
    found: list[tuple[Path, bool]] = []
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup") or ["0::/"]:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            bases = [mounts]
        elif controller in controllers.split(","):
            bases = [path for path in sorted(mounts.glob("*")) if controller in path.name.split(",")]
        else:
            continue
        # In a container, the path may be the host's and not exist here; the mount's root is then our own cgroup.
        parts = [part for part in name.split("/") if part not in ("", "..")]
        found += [
            (base.joinpath(*parts[:depth]), controllers == "") for base in bases for depth in range(len(parts), -1, -1)
        ]
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
