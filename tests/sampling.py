"""Sampling: datasets of the numbers that their samples draw, by each protocol."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data

from aioload import DataLoader, sample_rng
from aioload.engine import staged

SIZE = 12


def draw() -> int:
    return int(sample_rng().integers(1 << 62))


class Drawing:
    """Each sample is its index and two numbers."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> Any:
        return index, draw(), draw()


class ManyDrawing(Drawing):
    """Draws the same for a whole batch at once."""

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        samples = []
        for index in indices:
            generator = sample_rng(index)
            samples.append((index, *(int(generator.integers(1 << 62)) for _ in range(2))))
        return samples


class AsyncDrawing(Drawing):
    async def __getitem__(self, index: Any) -> Any:
        first = draw()
        await asyncio.sleep(0)
        return index, first, draw()


class InTasks(Drawing):
    """The second number is drawn in a task that knows of the first, though the sample itself draws none."""

    async def __getitem__(self, index: Any) -> Any:
        async def drawn() -> int:
            return draw()

        first, second = await asyncio.gather(asyncio.create_task(drawn()), drawn())
        return index, first, second


class InThread(Drawing):
    async def __getitem__(self, index: Any) -> Any:
        return index, await asyncio.to_thread(draw), draw()


class Files(Drawing):
    """Draws in ``decode``, and before that in ``location``, whose numbers are noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.locations: dict[int, int] = {}
        self.threads: set[str] = set()
        for index in range(SIZE):
            (folder / str(index)).write_text(str(index))

    def location(self, index: int) -> str:
        self.locations[index] = draw()
        return str(self.folder / str(index))

    def decode(self, data: bytes, index: int) -> Any:
        self.threads.add(threading.current_thread().name.rsplit("-", 1)[0])
        assert int(data) == index
        return index, draw(), draw()


class Items(Drawing, torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(SIZE):
            yield index, draw(), draw()


class Shards(Drawing, torch.utils.data.IterableDataset[Any]):
    """Shards itself as torch's documentation shows."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(number, SIZE, num_workers):
            yield index, draw(), draw()


def plain(samples: list[Any]) -> list[Any]:
    return samples


def passes(dataset: Any, num_passes: int = 2, **arguments: Any) -> list[Any]:
    """Return the samples of several passes, each a list in the order of its batches."""
    with DataLoader(dataset, 3, **{"collate_fn": plain, "seed": 5, **arguments}) as loader:
        return [[sample for batch in loader for sample in batch] for _ in range(num_passes)]


def passes_of_a_coroutine(dataset: Any, num_passes: int = 2, **arguments: Any) -> list[Any]:
    got: list[Any] = []  # not what the task returns: asyncio.run writes that out, whatever it is, and drops the text

    async def drain() -> None:
        async with DataLoader(dataset, 3, **{"collate_fn": plain, "seed": 5, **arguments}) as loader:
            got.extend([[sample async for batch in loader for sample in batch] for _ in range(num_passes)])

    asyncio.run(drain())
    return got


MAKE: dict[str, Callable[[Path], Any]] = {
    "map": lambda _: Drawing(),
    "many": lambda _: ManyDrawing(),
    "async": lambda _: AsyncDrawing(),
    "async in tasks": lambda _: InTasks(),
    "async in a thread": lambda _: InThread(),
    "files": Files,
    "concat": lambda _: torch.utils.data.ConcatDataset([Half(0), Half(1)]),
    "subset": lambda _: torch.utils.data.Subset(Shifted(), range(1, SIZE + 1)),  # type: ignore[arg-type]
}
"""Those whose samples have indices; each gives the same."""


class Half(torch.utils.data.Dataset[Any]):
    """Half of the samples; a ``ConcatDataset`` asks for those of the second half by smaller indices."""

    def __init__(self, number: int) -> None:
        self.first = number * SIZE // 2

    def __len__(self) -> int:
        return SIZE // 2

    def __getitem__(self, index: int) -> Any:
        return self.first + index, draw(), draw()


class Shifted(Drawing):
    """For a ``Subset`` that begins at 1."""

    def __getitem__(self, index: Any) -> Any:
        return index - 1, draw(), draw()


def decode_where_it_was_read(monkeypatch: Any, *, always: bool) -> None:
    """Have files decoded on the threads that read them, from the second batch on, or never."""
    monkeypatch.setattr(staged, "INLINE_BELOW_S", 1.0 if always else 0.0)
    monkeypatch.setattr(staged, "OFFLOAD_ABOVE_S", 1.0 if always else 0.0)


def numbers_of(samples: list[Any]) -> "np.ndarray[Any, Any]":
    return np.array([number for _, *numbers in samples for number in numbers], np.float64) / (1 << 62)
