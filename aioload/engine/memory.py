"""Memory: how many bytes this process may still use, by the machine and by its control group."""

from pathlib import Path

_ASSUMED = 4 << 30
"""What is assumed where the system does not say."""


def available_bytes() -> int:
    """Return the bytes that can be allocated now without swapping or hitting the control group's limit."""
    return min(_of_machine(), _of_cgroup())


def _of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _ASSUMED


def _of_cgroup() -> int:
    try:
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2].lstrip("/")
        folder = Path("/sys/fs/cgroup") / group
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            return max(0, int(limit) - int((folder / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass
    return _of_machine()
