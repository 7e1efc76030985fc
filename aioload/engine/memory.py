"""Memory: how many bytes this process may still use, by the machine and by its control groups."""

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
    return min([_of_machine(proc), *_of_groups(proc, groups)])


def _of_machine(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _ASSUMED


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (groups / "memory", _V1) if controllers else (groups, _V2)
        # Each group above has a limit of its own. A container may see the path from outside, and only its own root.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield from _of_group(group, *files)
            if group == root:
                break


def _of_group(group: Path, limit_name: str, used_name: str, file_keys: tuple[str, ...]) -> Iterator[int]:
    try:
        limit = int((group / limit_name).read_text())
        used = int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        droppable = sum(int(stat.get(key, 0)) for key in file_keys)
    except (OSError, ValueError):  # no such group, or "max"
        return
    yield max(0, limit - max(0, used - droppable))
