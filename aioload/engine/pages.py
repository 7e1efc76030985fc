"""Pages: a process that others are forked off keeps its memory in large pages, of which a fork has less to copy.

A fork copies no memory, but the list of its pages: for torch's 150 MB some 40,000 entries of 4 KB each. With those of
2 MB, where there can be such, it takes 1.1 to 1.9 ms in place of 2.9 to 5. Who then writes to one copies 4 KB, as ever.
"""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_LARGE = 2 << 20
_LEAST_USED = 0.9
"""Part of a region that is to be in use: what is not would be filled with zeros."""

_COLLAPSE = 25
"""``MADV_COLLAPSE``, of Linux 6.1, which :mod:`mmap` has no name for."""

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s+(?:\[heap\]|\[anon:.*\])?$")


def use_large_pages() -> None:
    """Have the kernel gather what this process has allocated in large pages, where it can and is allowed to."""
    with contextlib.suppress(OSError, AttributeError):  # no such system
        if "[never]" in _SETTING.read_text():
            return
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in list(_full_regions(Path("/proc/self/smaps").read_text())):
            first, last = -(-start // _LARGE) * _LARGE, end // _LARGE * _LARGE
            if first < last:
                madvise(first, last - first, _COLLAPSE)  # what it cannot do it leaves as it is


def _full_regions(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield where the regions of allocated memory begin and end that are in use almost wholly."""
    region = None
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss" and region is not None:
            start, end = region
            if int(rest.split()[0]) * 1024 >= _LEAST_USED * (end - start):
                yield region
            region = None
        elif line[:1].islower() or line[:1].isdigit():
            found = _REGION.match(line)
            region = None if found is None else (int(found[1], 16), int(found[2], 16))
