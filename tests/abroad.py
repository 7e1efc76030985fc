"""Abroad: datasets for engine processes, which must be found there by name."""

import ctypes
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from aioload import FileDataset, get_worker_info, sample_rng
from aioload.engine.parcel import Parcel


class Point(NamedTuple):
    image: Any
    label: int
    name: str


class FieldsError(Exception):
    """An exception that cannot be made of its arguments, with a field."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code, self.where, self.lock = code, where, threading.Lock()


class Points:
    """Samples with everything in them that a layout has; some raise."""

    def __init__(self, size: int, *, bad: tuple[int, ...] = ()) -> None:
        self.size, self.bad = size, bad
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Point:
        if index in self.bad:
            raise FieldsError(index, where="here")
        return Point(np.full((2, 3), index, np.float32), index, f"sample {index}")


class Holding:
    """Samples of a large array, which tell what of its memory is this process's alone; and one that they write to."""

    def __init__(self, num_bytes: int) -> None:
        self.array = np.arange(num_bytes // 8)
        self.scribbles = torch.zeros(1000)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.array.sum() > 0
        self.scribbles[0] += 1
        path, sizes = mapping_of(int(self.array.ctypes.data))
        return {
            "number": self.array[index],
            "path": path,
            "own_kb": sizes["Anonymous"],
            "there_kb": sizes["Rss"],
            "scribbled": self.scribbles[0].item(),
        }


def mapping_of(address: int) -> tuple[str, dict[str, int]]:
    """Return the file that is mapped at an address, and the kilobytes that the system tells of the mapping."""
    path, sizes, is_it = "", dict[str, int](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            is_it = start <= address < end
            path = " ".join(words[4:]) if is_it else path
        elif is_it and words[-1] == "kB":
            sizes[name[:-1]] = int(words[0])
    return path, sizes


class Growing:
    """Samples that are each larger than the one before."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return np.full(100 * (index + 1), index, np.uint8)


class Mixed:
    """Samples of which every other four make a batch that has no layout, as not all their numbers are of a kind."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = float(index) if index % 8 == 5 else index
        return {"x": torch.full((300,), index), "number": number}


class Drawing:
    """Samples that are drawn at random, and tell who drew them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        numbers = (-1, -1) if info is None else (info.id, -1 if info.process is None else info.process)
        return {"drawn": sample_rng().random(3), "pid": os.getpid(), "worker": numbers}


class Asynchronous:
    """Samples that are awaited."""

    def __len__(self) -> int:
        return 20

    async def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index)


class Deadly:
    """Samples of which one ends the process."""

    def __init__(self, deadly: int, way: str) -> None:
        self.deadly, self.way = deadly, way

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == self.deadly:
            die(self.way)
        return index


def die(way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "segfault":
        ctypes.string_at(0)
    else:
        os._exit(3)


def deadly_decode(data: bytes, index: int) -> int:
    if index == 9:
        die("killed")
    return index


def deadly_late(data: bytes, index: int) -> int:
    if index == 202:  # by then it is known that decoding takes no time
        die("killed")
    return index


def deadly_collate(samples: list[int]) -> list[int]:
    if 12 in samples:
        die("killed")
    return samples


def sent(*contents: Any, times: int = 1) -> list[Any]:
    """Return what so many processes make of the contents that they are given."""
    parcel = Parcel({"contents": contents}, is_for_forks=False)
    made = []
    for _ in range(times):
        other = Parcel({}, is_for_forks=True)
        other.unpack(*[os.dup(file) for file in parcel.files])
        assert other.error is None
        made.append(other.contents["contents"])
    parcel.close()
    return made


def decode_numbers(data: bytes, index: int) -> tuple[Any, int]:
    return np.frombuffer(data, np.uint8).copy(), index


def files_in(folder: Path, count: int, decode: Any = decode_numbers, *, missing: int | None = None) -> FileDataset[Any]:
    """Return a dataset of small files, of which one may not be there."""
    paths = [folder / f"{number}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        if number != missing:
            path.write_bytes(bytes([number, number + 1, number + 2]))
    return FileDataset([str(path) for path in paths], decode)


def ragged(samples: list[Any]) -> dict[str, Any]:
    """Return a batch that no layout has: a collate_fn."""
    images = [torch.arange(sample.label) for sample in samples]
    turned = torch.arange(6.0).view(2, 3).t()
    return {"images": images, "turned": turned, "arrays": np.arange(3), "names": [sample.name for sample in samples]}


def unsendable(samples: list[Any]) -> Any:
    return lambda: samples


class Epochs:
    """Samples that are the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


def instead(exc: Exception) -> Point:
    """Return a sample in place of one that failed."""
    return Point(np.zeros((2, 3), np.float32), -1, str(exc))


class Spare:
    """Arrays and tensors with a stride that one item, or none, has no use for."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return (np.arange(0), np.arange(4)[::4], torch.arange(6)[::6], torch.arange(3).expand(2, 3)[:, :0])[index]


class Stream(torch.utils.data.IterableDataset[int]):
    """Twenty-two numbers, of which each worker yields a part."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter(range(info.id, 22, info.num_workers))


_here = threading.local()


def note_worker(number: int) -> None:
    _here.number = number


def little_memory(_: int) -> None:
    """Let no file of this process, shared memory among them, grow beyond 64 KB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def stacked(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack(samples)}


def refuse(number: int) -> None:
    if number == 1:
        raise FieldsError(number, where="beginning")


class Seeded:
    """Samples that are the number that ``note_worker`` was given in their thread."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return int(_here.number)


class Many:
    """Samples that are loaded a batch at a time."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return -index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class Stuck:
    """Samples of which one never comes."""

    def __init__(self, stuck: int) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == self.stuck:
            threading.Event().wait()
        return index


class Unwelcome(Points):
    """A dataset that cannot be unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise FieldsError(3, where="unpickling")


class Shared:
    """Samples that count in a shared value how many there were."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self.count = context.Value("i", 0)
        self.lock = context.Lock()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        with self.lock, self.count.get_lock():
            self.count.value += 1
        return index


class Scheduled:
    """Samples that tell how the kernel schedules who loads them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.sched_getscheduler(0)


class Large:
    """Samples of a megabyte."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 20,), index, dtype=torch.uint8)


def fork_with_interrupts() -> None:
    """Write whether an interrupt comes through to this process, and to a fork of it."""
    ways = [_is_interruptible()]
    pid = os.fork()
    if pid == 0:
        os._exit(_is_interruptible())
    text = repr([*ways, bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))])
    os.write(1, f"{text}\n".encode())


def _is_interruptible() -> bool:
    is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return not is_blocked and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Hog:
    """Samples of which one keeps the interpreter for hours, as C code may."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == 5:
            return sum(range(10**13))
        return index


class Told:
    """A reader that notes which reads have begun, and ends none before a file ``go`` is there, but for the first ones.

    Those, below ``num_quick``, are done at once, and not noted.
    """

    def __init__(self, folder: Path, num_quick: int = 0) -> None:
        self.folder, self.num_quick = folder, num_quick

    def read(self, location: str, offset: int = 0, length: int | None = None) -> bytes:
        if int(location) < self.num_quick:
            return location.encode()
        (self.folder / location).touch()
        while not (self.folder / "go").exists():
            time.sleep(0.005)
        return location.encode()


def threads_here(data: bytes, index: int) -> list[str]:
    return [thread.name for thread in threading.enumerate()]
