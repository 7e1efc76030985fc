"""Memory: how many bytes this process may still use, by the machine and by its control groups."""

import math
from collections.abc import Iterator
from pathlib import Path

_ASSUMED = 4 << 30
"""What is assumed where the system does not say."""

# Where each version of control groups has its limit, what is used of it, and how much of that is files the kernel
# can drop at any time: a loader fills its group with those, up to the limit, and is none the poorer.
# https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be allocated now without swapping or hitting a limit of the process's control groups.

    Args:
        proc: Where the system tells of processes and memory.
        groups: Where it tells of control groups, of either version.
    """
    # Each pass asks, so these are names and not paths, which take longer to put together than to read.
    total, available = _of_machine(str(proc))
    return min([available, *_of_groups(str(proc), str(groups), total)])


def _read(name: str) -> str:
    with open(name) as file:
        return file.read()


def _of_machine(proc: str) -> tuple[float, int]:
    """Return the bytes that the machine has, infinitely many where it does not say, and those that are available."""
    total = math.inf
    try:
        for line in _read(f"{proc}/meminfo").splitlines():
            if line.startswith("MemTotal:"):
                total = int(line.split()[1]) * 1024
            elif line.startswith("MemAvailable:"):
                return total, int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return total, _ASSUMED


def _of_groups(proc: str, groups: str, total: float) -> Iterator[int]:
    try:
        lines = _read(f"{proc}/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (f"{groups}/memory", _V1) if controllers else (groups, _V2)
        # Each group above has a limit of its own. A container may see the path from outside, and only its own root.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield from _of_group("/".join([root, *parts[:depth]]), total, *files)


def _of_group(group: str, total: float, limit_name: str, used_name: str, file_keys: tuple[str, ...]) -> Iterator[int]:
    try:
        limit = int(_read(f"{group}/{limit_name}"))
        if limit >= total:  # what is left of it is no less than what is left of the machine
            return
        used = int(_read(f"{group}/{used_name}"))
        stat = dict(line.split() for line in _read(f"{group}/memory.stat").splitlines())
        droppable = sum(int(stat.get(key, 0)) for key in file_keys)
    except (OSError, ValueError):  # no such group, or "max"
        return
    yield max(0, limit - max(0, used - droppable))
