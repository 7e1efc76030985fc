"""Rivals on slow storage: ways of having many reads under way, each a context that lends an epoch of batches.

All of them read with aioload's own reader and decode with the same function. Those that start processes have them
started before the clock runs, and where that cannot be had without a first batch, that one is not clocked.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import aioload
from benchmarks.rivals import Epoch, Files, window

Batches = Callable[[], AbstractContextManager[Iterable[Any]]]


def clocked(batches: Batches, *, most_s: float, step_s: float = 0.0) -> Epoch:
    """Clock an epoch, or as much of it as begins in ``most_s`` seconds, with a training step that sleeps."""

    def epoch() -> tuple[int, float]:
        num_samples = 0
        with batches() as loader:
            start = time.perf_counter()
            for batch in loader:
                num_samples += len(batch)
                if step_s:
                    time.sleep(step_s)
                if time.perf_counter() - start > most_s:
                    break
            return num_samples, time.perf_counter() - start

    return epoch


def aioload_batches(dataset: Any, **arguments: Any) -> Batches:
    """Lend aioload's loader; its threads start with the clock."""
    return lambda: closing(aioload.DataLoader(dataset, **arguments))


def aioload_again_batches(dataset: Any, *, most_s: float, **arguments: Any) -> Batches:
    """Lend aioload's loader after an epoch, or so many seconds of it: what it finds out by itself, it knows."""

    @contextmanager
    def batches() -> Iterator[Iterable[Any]]:
        with closing(aioload.DataLoader(dataset, **arguments)) as loader:
            clocked(lambda: nullcontext(loader), most_s=most_s)()
            yield loader

    return batches


def window_batches(files: Files, *, batch_size: int, num_threads: int) -> Batches:
    """Lend the loader that fits on a page."""
    return lambda: closing(_generator(window(files, batch_size=batch_size, num_threads=num_threads)))


def torch_batches(files: Dataset[Any], *, batch_size: int, num_workers: int) -> Batches:
    """Lend torch's loader, whose processes have loaded a batch each and are idle again."""

    @contextmanager
    def batches() -> Iterator[Iterable[Any]]:
        order = _Order(num_workers * batch_size)
        started = num_workers > 0
        loader = DataLoader(files, batch_size, sampler=order, num_workers=num_workers, persistent_workers=started)
        for _ in loader:
            pass
        order.length = len(files)  # type: ignore[arg-type]
        yield loader

    return batches


def torch_pool_batches(files: Files, *, batch_size: int, num_workers: int, num_threads: int) -> Batches:
    """Lend torch's loader over a dataset that fetches a batch at once, by a thread pool in each process."""

    @contextmanager
    def batches() -> Iterator[Iterable[Any]]:
        pooled = _FilesInThreads(files, num_threads)
        with closing(pooled), torch_batches(pooled, batch_size=batch_size, num_workers=num_workers)() as loader:
            yield loader

    return batches


def nodes_batches(
    files: Files, *, batch_size: int, num_workers: int, whole: bool, method: str = "thread", prebatch: int | None = None
) -> Batches:
    """Lend torchdata.nodes, where a worker loads a sample, ``prebatch`` samples, or a whole batch at a time."""
    from torchdata import nodes

    @contextmanager
    def batches() -> Iterator[Iterable[Any]]:
        node = nodes.SamplerWrapper(_Order(len(files)))
        work = {"num_workers": num_workers, "method": method, "prebatch": prebatch}
        if whole:
            node = nodes.ParallelMapper(nodes.Batcher(node, batch_size, drop_last=False), _Whole(files), **work)
        else:
            node = nodes.Batcher(nodes.ParallelMapper(node, files.__getitem__, **work), batch_size, drop_last=False)
            node = nodes.Mapper(node, stacked)
        loader = iter(nodes.Loader(nodes.Prefetcher(node, 2)))
        if method == "process":
            next(loader)
        yield loader

    return batches


def spdl_batches(files: Files, *, batch_size: int, num_threads: int, chunk: int) -> Batches:
    """Lend an SPDL pipeline, where a task reads ``chunk`` samples, at most a batch, one after the other."""

    @contextmanager
    def batches() -> Iterator[Iterable[Any]]:
        pipes = _spdl_pipes(files, batch_size=batch_size, num_threads=num_threads, chunk=chunk)
        pipeline = pipes.build(num_threads=num_threads + 2, task_hook_factory=lambda _: [])
        with pipeline.auto_stop():
            yield pipeline.get_iterator()

    return batches


def spdl_process_batches(files: Files, *, batch_size: int, num_threads: int) -> Batches:
    """Lend an SPDL pipeline of a process of its own, which has sent its first batch."""
    from spdl.pipeline import run_pipeline_in_subprocess

    @contextmanager
    def batches() -> Iterator[Iterable[Any]]:
        pipes = _spdl_pipes(files, batch_size=batch_size, num_threads=num_threads, chunk=1)
        loader = iter(run_pipeline_in_subprocess(pipes.get_config(), num_threads=num_threads + 2))
        next(loader)
        yield loader

    return batches


def _spdl_pipes(files: Files, *, batch_size: int, num_threads: int, chunk: int) -> Any:
    from spdl.pipeline import PipelineBuilder

    pipes = PipelineBuilder().add_source(_chunks(len(files), chunk))
    if chunk == batch_size:
        pipes = pipes.pipe(_Whole(files), concurrency=num_threads, output_order="input")
    elif chunk == 1:
        pipes = pipes.pipe(_One(files), concurrency=num_threads, output_order="input")
        pipes = pipes.aggregate(batch_size).pipe(stacked)
    else:
        pipes = pipes.pipe(_Some(files), concurrency=num_threads, output_order="input")
        pipes = pipes.aggregate(batch_size // chunk).pipe(_stacked_lists)
    return pipes.add_sink(4)


def grain_batches(files: Files, *, batch_size: int, num_threads: int, whole: bool, num_workers: int = 0) -> Batches:
    """Lend grain, where a thread loads a sample or a whole batch at a time, in this process or in others."""
    import grain

    @contextmanager
    def batches() -> Iterator[Iterable[Any]]:
        dataset = grain.MapDataset.source(files)
        buffer = 2 * num_threads if whole else max(500, 4 * num_threads)
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer)
        if whole:
            batched = dataset.batch(batch_size).to_iter_dataset(options)
        else:
            batched = dataset.to_iter_dataset(options).batch(batch_size)
        if num_workers:
            batched = batched.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
        with closing(iter(batched)) as loader:
            if num_workers:
                next(loader)
            yield loader

    return batches


def stacked(samples: Sequence[Any]) -> torch.Tensor:
    """Put samples together in the fewest steps, for loaders that leave it to the user."""
    return torch.from_numpy(np.stack(samples))


def _stacked_lists(lists: Sequence[Sequence[Any]]) -> torch.Tensor:
    return stacked([sample for samples in lists for sample in samples])


def _chunks(length: int, size: int) -> list[range]:
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def _generator(batches: Iterator[Any]) -> Generator[Any, None, None]:
    yield from batches


class _Some:
    """Loads some samples, one after the other. A class, so that it can be sent to processes."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __call__(self, indices: Iterable[int]) -> Any:
        return [self.files[index] for index in indices]


class _One(_Some):
    def __call__(self, indices: Iterable[int]) -> Any:
        return super().__call__(indices)[0]


class _Whole(_Some):
    def __call__(self, indices: Iterable[int]) -> Any:
        return stacked(super().__call__(indices))


class _Order(Sampler[int]):
    """The indices from 0 on, so many at first, and more when ``length`` is set."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class _FilesInThreads(Files):
    """The dataset of those who have read torch's source: a batch is asked for at once, and read by threads."""

    def __init__(self, files: Files, num_threads: int) -> None:
        super().__init__(files.paths, files.decode, files.read)
        self.num_threads = num_threads
        self.pool: ThreadPoolExecutor | None = None

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.pool = self.pool or ThreadPoolExecutor(self.num_threads)
        return list(self.pool.map(self.__getitem__, indices))

    def close(self) -> None:
        """End the threads of this process."""
        if self.pool:
            self.pool.shutdown()
