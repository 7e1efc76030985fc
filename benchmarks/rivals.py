"""Rivals: ways of loading the same samples, each a function that loads one epoch by its own clock."""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import aioload

Decode = Callable[[bytes, int], Any]
Epoch = Callable[[], tuple[int, float]]

WINDOW_BATCHES = 4


def read_plainly(path: str) -> bytes:
    """Read a file as most datasets do."""
    with open(path, "rb") as file:
        return file.read()


class Files(Dataset[Any]):
    """The dataset most people would write: read a file, decode it."""

    def __init__(self, paths: list[str], decode: Decode, read: Callable[[str], bytes] = read_plainly) -> None:
        self.paths, self.decode, self.read = paths, decode, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read(self.paths[index]), index)


def window(dataset: Files, *, batch_size: int, num_threads: int) -> Iterator[torch.Tensor]:
    """Yield batches from a window of futures, one a sample: the loader that fits on a page."""
    with ThreadPoolExecutor(num_threads) as pool:
        indices = iter(range(len(dataset)))
        futures: deque[Future[Any]] = deque()
        for index in islice(indices, WINDOW_BATCHES * batch_size):
            futures.append(pool.submit(dataset.__getitem__, index))
        samples = []
        while futures:
            samples.append(futures.popleft().result())
            for index in islice(indices, 1):
                futures.append(pool.submit(dataset.__getitem__, index))
            if len(samples) == batch_size:
                yield default_collate(samples)
                samples = []
        if samples:
            yield default_collate(samples)


def window_epoch(dataset: Files, *, batch_size: int, num_threads: int) -> Epoch:
    """Clock an epoch of the window of futures, the start of its threads included."""
    return lambda: _clocked(window(dataset, batch_size=batch_size, num_threads=num_threads))


def torch_epoch(dataset: Dataset[Any], **arguments: Any) -> Epoch:
    """Clock an epoch of torch's loader, the start and end of its worker processes included."""
    return lambda: _clocked(DataLoader(dataset, **arguments))


def torch_epoch_started(dataset: Dataset[Any], **arguments: Any) -> Epoch:
    """Clock an epoch of torch's loader whose worker processes are already there."""

    def epoch() -> tuple[int, float]:
        loader = DataLoader(dataset, persistent_workers=True, **arguments)
        next(iter(loader))
        return _clocked(loader)

    return epoch


def aioload_epoch(dataset: Any, **arguments: Any) -> Epoch:
    """Clock an epoch of aioload's loader, the start of its threads included."""

    def epoch() -> tuple[int, float]:
        with closing(aioload.DataLoader(dataset, **arguments)) as loader:
            return _clocked(loader)

    return epoch


def aioload_epoch_started(dataset: Any, **arguments: Any) -> Epoch:
    """Clock an epoch of aioload's loader whose threads, or processes, are already there."""

    def epoch() -> tuple[int, float]:
        with closing(aioload.DataLoader(dataset, persistent_workers=True, **arguments)) as loader:
            next(iter(loader))
            return _clocked(loader)

    return epoch


def bare_threads_epoch(dataset: Files, *, num_threads: int) -> Epoch:
    """Clock threads that take indices from one iterator and drop every sample: a ceiling, not a loader."""

    def take(indices: Iterator[int]) -> None:
        for index in indices:
            dataset[index]

    def epoch() -> tuple[int, float]:
        indices = iter(range(len(dataset)))
        threads = [threading.Thread(target=take, args=(indices,)) for _ in range(num_threads)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(dataset), time.perf_counter() - start

    return epoch


def bare_processes_epoch(dataset: Dataset[Any], *, num_processes: int) -> Epoch:
    """Clock processes, already there, that share out the indices and drop every sample: a ceiling, not a loader."""
    context = multiprocessing.get_context("fork")

    def take(number: int, barrier: Any) -> None:
        barrier.wait()
        for index in range(number, len(dataset), num_processes):  # type: ignore[arg-type]
            dataset[index]
        barrier.wait()

    def epoch() -> tuple[int, float]:
        barrier = context.Barrier(num_processes + 1)
        processes = [context.Process(target=take, args=(number, barrier)) for number in range(num_processes)]
        for process in processes:
            process.start()
        barrier.wait()
        start = time.perf_counter()
        barrier.wait()
        seconds = time.perf_counter() - start
        for process in processes:
            process.join()
        return len(dataset), seconds  # type: ignore[arg-type]

    return epoch


def torch_first_batch(dataset: Dataset[Any], **arguments: Any) -> Epoch:
    """Clock the wait for the first batch of torch's loader."""
    return lambda: _clocked_first(DataLoader(dataset, **arguments))


def aioload_first_batch(dataset: Any, **arguments: Any) -> Epoch:
    """Clock the wait for the first batch of a new aioload loader."""

    def epoch() -> tuple[int, float]:
        with closing(aioload.DataLoader(dataset, **arguments)) as loader:
            return _clocked_first(loader)

    return epoch


def _clocked(loader: Iterable[Any]) -> tuple[int, float]:
    """Load every batch, and count the samples that came."""
    num_samples = 0
    start = time.perf_counter()
    for batch in loader:
        num_samples += len(batch if isinstance(batch, torch.Tensor) else batch[0])
    return num_samples, time.perf_counter() - start


def _clocked_first(loader: Any) -> tuple[int, float]:
    """Load the first batch, and count it as one."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    return 1, time.perf_counter() - start
