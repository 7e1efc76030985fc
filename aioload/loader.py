"""The loader: torch's DataLoader by its arguments and attributes, our engine by its work."""

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.utils.data as torch_data

from aioload.collate import rows_allowed
from aioload.copier import resolve_device
from aioload.engine import aside, window
from aioload.engine.memory import available_bytes
from aioload.engine.runtime import Plan, Runtime
from aioload.engine.settings import Settings
from aioload.engine.source import Kind, Source
from aioload.errors import ArgumentError
from aioload.iterators import AsyncBatchIterator, BatchIterator
from aioload.stats import LoaderStats
from aioload.types import MapDataset, StagedDataset

T_co = TypeVar("T_co", covariant=True)

SLOW_AFTER_S = 30.0
"""A batch that is waited for longer than this is logged, with what is missing, once a wait."""

_MEMORY_SHARE = 4
"""The batches ahead of the consumer may fill one part in this many of the memory that is available."""


class DataLoader(torch_data.DataLoader[T_co]):
    """Batches of a dataset, loaded ahead by threads of this process.

    It takes the place of :class:`torch.utils.data.DataLoader` and yields the same batches; what differs is said
    here. ``for batch in loader`` and ``async for batch in loader`` each begin a new pass; any number may go on
    at once. A batch belongs to the consumer: its memory is not written to again while anything refers to it.

    Args:
        dataset: A map-style dataset (``__getitem__`` and ``__len__``; ``__getitems__`` is called once per batch),
            one with ``async def __getitem__``, one with ``location`` and ``decode``, or an ``IterableDataset``,
            which is passed over once whatever ``num_workers`` is. See :mod:`aioload.types`.
        batch_size: Samples per batch; ``None`` yields samples as they are.
        shuffle: Whether each pass has a new random order.
        sampler: Yields indices. Drawn from in the consumer's thread.
        batch_sampler: Yields lists of indices.
        num_workers: Threads that run dataset code; by default one per usable core. With 0 there are no threads
            and no look-ahead: everything runs in the consumer's thread, when it asks.
        collate_fn: Makes a batch of a list of samples, on a loading thread.
        pin_memory: Whether CPU batches are in page-locked memory. Where there is no accelerator this does nothing.
        drop_last: Whether an incomplete last batch is left out.
        timeout: Seconds to wait for a batch before :class:`~aioload.errors.LoaderTimeoutError`; 0 waits for ever.
        worker_init_fn: Called with its number in each of the ``num_workers`` threads before its first sample.
        multiprocessing_context: Not supported: there are no worker processes.
        generator: Source of the random order.
        prefetch_factor: Batches loaded ahead per worker thread, so ``prefetch_factor * num_workers`` in all. More
            where that would be fewer samples than ``num_concurrent_reads``, fewer where batches ahead would
            fill more than a quarter of the memory available.
        persistent_workers: Whether threads outlive a pass. The next pass then begins to load while the present
            one ends, if the sampler is one of torch's. It begins anew if by then a generator, the sampler,
            dataset or collate_fn, or what they are made of, has changed (of large arrays a part is looked at).
        pin_memory_device: Not supported; the current accelerator is used.
        in_order: Whether batches come in the sampler's order; ``False`` yields each when it is ready.
        device: Where batches arrive. For a CUDA device the copy runs on a stream of the loader's own, and the
            stream that is current at ``next()`` waits for it, not the host.
        seed: Not supported yet.
        num_concurrent_reads: Reads in flight over all batches, for datasets with ``location`` and ``decode``, or
            samples awaited at once for async ones. Fewer are under way when they are so short that threads
            would only contend for the interpreter.

    Raises:
        ArgumentError: An argument cannot work (it is a ``ValueError``).
        NotImplementedError: An argument's meaning has not been built yet.
        ValueError: As torch's own DataLoader.
    """

    def __init__(
        self,
        dataset: MapDataset[T_co] | StagedDataset[T_co] | torch_data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = 2,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: Any = None,
        seed: int | None = None,
        num_concurrent_reads: int = 32,
    ) -> None:
        _refuse_unbuilt(multiprocessing_context=multiprocessing_context, seed=seed, pin_memory_device=pin_memory_device)
        if num_workers is None:
            num_workers = usable_cores()
        if num_workers == 0 and timeout > 0:
            message = f"timeout={timeout!r} needs num_workers > 0: without threads nothing can interrupt a sample."
            raise ArgumentError(message)
        if not isinstance(num_concurrent_reads, int) or num_concurrent_reads < 1:
            message = f"num_concurrent_reads needs a whole number from 1 up; got {num_concurrent_reads!r}."
            raise ArgumentError(message)
        # torch knows prefetch_factor only beside workers; 2 is our default and so cannot be told from "not given".
        factor = None if num_workers == 0 and prefetch_factor == 2 else prefetch_factor
        super().__init__(
            cast("torch_data.Dataset[T_co]", dataset),  # torch asks for less than it says
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            bool(pin_memory),
            drop_last,
            timeout,
            worker_init_fn,
            None,
            generator,
            prefetch_factor=factor,
            persistent_workers=persistent_workers,
            in_order=in_order,
        )
        self.device = resolve_device(device)
        self.seed = seed
        self.num_concurrent_reads = num_concurrent_reads
        self._runtimes: dict[int, Runtime] = {}  # by process: a forked child makes its own

    def __iter__(self) -> "BatchIterator":  # type: ignore[override]  # torch declares its own iterator class
        """Begin a new pass, and start to load."""
        return BatchIterator(self, self._runtime().begin(self._plan()))

    def __aiter__(self) -> "AsyncBatchIterator":
        """Begin a new pass for a coroutine; loading starts with the first ``await``."""
        return AsyncBatchIterator(self, self._runtime().begin(self._plan()))

    def __enter__(self) -> "DataLoader[T_co]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "DataLoader[T_co]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await aside.call(self.close)

    def close(self) -> None:
        """End all passes over this loader and its threads; a later ``iter()`` begins anew.

        Waits up to a second for threads; one that is stuck in a read ends when the read does. Any thread may
        call it, also while another waits for a batch, who then gets a
        :class:`~aioload.errors.LoaderClosedError`.
        """
        runtime = self._runtimes.get(os.getpid())
        if runtime is not None:
            runtime.close()

    def stats(self) -> LoaderStats:
        """Return what has been loaded, and where the time went, since the loader was made."""
        return self._runtime().stats()

    def check_worker_number_rationality(self) -> None:
        """Do nothing: torch warns of too many worker processes here, and threads are not that."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments; nothing that is under way travels."""
        return {**self.__dict__, "_runtimes": {}}

    def _get_iterator(self) -> Any:
        return iter(self)

    def _runtime(self) -> Runtime:
        runtime = self._runtimes.get(os.getpid())
        if runtime is None:  # two threads may get here at once: one of theirs is taken, by both
            new = Runtime(self._plan())
            runtime = self._runtimes.setdefault(os.getpid(), new)
            if runtime is new:
                runtime.close_with(self)
        return runtime

    def _plan(self) -> Plan:
        batched = self._auto_collation
        by_rows = batched and self.num_workers > 0 and rows_allowed(self.collate_fn)
        kind = Source(self.dataset, batched=batched, by_rows=by_rows).kind
        max_batches = window.max_batches(
            prefetch_factor=self.prefetch_factor or 0,
            num_workers=self.num_workers,
            batch_size=getattr(self.batch_sampler, "batch_size", None) or 1 if batched else 1,
            num_concurrent=self.num_concurrent_reads if kind in (Kind.STAGED, Kind.ASYNC) else 0,
        )
        return Plan(
            dataset=self.dataset,
            index_sampler=self._index_sampler,
            generator=self.generator,
            device=self.device,
            num_workers=self.num_workers,
            num_concurrent_reads=self.num_concurrent_reads,
            persistent=self.persistent_workers,
            worker_init_fn=self.worker_init_fn,
            settings=Settings(
                collate_fn=self.collate_fn,
                batched=batched,
                by_rows=by_rows,
                drop_last=self.drop_last,
                in_order=self.in_order,
                pin=self._pins(),
                timeout_s=self.timeout,
                slow_after_s=SLOW_AFTER_S,
                max_batches=max_batches,
                max_bytes=available_bytes() // _MEMORY_SHARE,
            ),
        )

    def _pins(self) -> bool:
        return bool(self.pin_memory) and self.device.type == "cpu" and torch.cuda.is_available()


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _refuse_unbuilt(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value != "":
            message = f"{name}={value!r}: this argument has no effect yet. Leave it out."
            raise NotImplementedError(message)
