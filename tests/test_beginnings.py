"""What an engine process does, and does not do, before its first batch."""

import ctypes
import mmap
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from abroad import Points, Told, files_in, threads_here

from aioload import DataLoader, FileDataset
from aioload.engine import server
from aioload.engine.pages import _full_regions, use_large_pages

pytestmark = pytest.mark.usefixtures("forks_are_served", "no_process_is_left")

LARGE = 2 << 20


def decode(data: bytes, index: int) -> str:
    return data.decode()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_first_read_that_takes_long_does_not_keep_others_waiting(processes: int, tmp_path: Path) -> None:
    names = [f"{number}" for number in range(16)]
    arguments: dict[str, Any] = {"num_workers": 1, "num_concurrent_reads": 8, "reader": Told(tmp_path)}
    with DataLoader(FileDataset(names, decode), 16, processes=processes, **arguments) as loader:
        batches = iter(loader)
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 8:  # nobody waits for a batch
            assert time.monotonic() < deadline
            time.sleep(0.005)
        (tmp_path / "go").touch()
        assert next(batches) == names


@pytest.mark.parametrize("processes", [0, 1])
def test_reads_behind_one_that_turns_slow_are_done_beside_it(processes: int, tmp_path: Path) -> None:
    """Several quick ones go together to one thread; it does not keep those that others could be at."""
    names = [f"{number}" for number in range(308)]
    arguments: dict[str, Any] = {"num_workers": 1, "num_concurrent_reads": 8, "reader": Told(tmp_path, num_quick=300)}
    with DataLoader(FileDataset(names, decode), 20, processes=processes, **arguments) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(15)] == [names[first : first + 20] for first in range(0, 300, 20)]
        last = list[Any]()
        waiting = threading.Thread(target=lambda: last.append(next(batches)))
        waiting.start()
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        num_begun = len(list(tmp_path.iterdir()))
        (tmp_path / "go").touch()
        waiting.join()
    assert num_begun == 8
    assert last == [names[300:]]


def test_a_process_that_reads_files_has_no_loop(tmp_path: Path) -> None:
    with DataLoader(files_in(tmp_path, 4, threads_here), None, processes=1, num_workers=1) as loader:
        there = list(loader)
    assert len(there) == 4
    for names in there:
        assert "MainThread" in names
        assert "aioload-loop" not in names


def large_kb(smaps: str) -> int:
    return sum(map(int, re.findall(r"^AnonHugePages:\s+(\d+) kB$", smaps, re.MULTILINE)))


def can_collapse() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        return False
    with mmap.mmap(-1, 2 * LARGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes([1]) * len(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        first = -(-start // LARGE) * LARGE
        return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(LARGE), 25) == 0)


@pytest.mark.skipif(not can_collapse(), reason="needs a kernel that gathers memory in large pages when asked to")
def test_the_server_keeps_what_it_has_allocated_in_large_pages() -> None:
    with DataLoader(Points(8), 4, processes=1) as loader:
        assert len(list(loader)) == 2
    pid = server._pid_of_server()
    there = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (anonymous_kb,) = map(int, re.findall(r"^Anonymous:\s+(\d+) kB$", there, re.MULTILINE))
    assert large_kb(there) > anonymous_kb / 2


SMAPS = """\
55870229c000-558702700000 rw-p 00000000 00:00 0                          [heap]
Size:               4496 kB
Rss:                4400 kB
VmFlags: rd wr mr mw me ac sd
7f789dd3e000-7f78a0313000 rw-p 00000000 00:00 0
Size:              38740 kB
Rss:               20000 kB
7f78a03ff000-7f78a09ff000 rw-p 00000000 00:00 0 \n\
Rss:                6144 kB
7f78bc7e5000-7f78bca85000 r--p 00000000 fe:00 123                        /usr/lib/libtorch_cpu.so
Rss:                2688 kB
7f78bca85000-7f78bcb09000 rw-p 002a0000 fe:00 123                        /usr/lib/libtorch_cpu.so
Rss:                 528 kB
7f78c0000000-7f78c0200000 rw-p 00000000 00:00 0                          [anon:cpython:mimalloc]
Rss:                2048 kB
7ffe64dfa000-7ffe64e1b000 rw-p 00000000 00:00 0                          [stack]
Rss:                 132 kB
"""


def test_large_pages_are_for_what_is_allocated_and_in_use() -> None:
    regions = [
        (0x55870229C000, 0x558702700000),
        (0x7F78A03FF000, 0x7F78A09FF000),
        (0x7F78C0000000, 0x7F78C0200000),
    ]
    assert list(_full_regions(SMAPS)) == regions


def test_memory_stays_as_it_is_when_it_is_gathered() -> None:
    kept = [bytes([number]) * 100_000 for number in range(256)]
    use_large_pages()
    assert all(data == bytes([number]) * 100_000 for number, data in enumerate(kept))
