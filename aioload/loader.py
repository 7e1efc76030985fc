"""The loader: torch's DataLoader by its arguments and attributes, our engine by its work."""

import asyncio
import concurrent.futures
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.utils.data as torch_data

from aioload.collate import rows_allowed
from aioload.copier import resolve_device
from aioload.engine import window
from aioload.engine.memory import available_bytes
from aioload.engine.run import Answer, Settings
from aioload.engine.runtime import Pass, Plan, Runtime
from aioload.engine.source import Kind, Source
from aioload.errors import ArgumentError
from aioload.stats import LoaderStats

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
            one ends, if the sampler is one of torch's and the dataset's attributes stay the same objects.
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
        dataset: Any,
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
            dataset,
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
        self._runtime_or_none: Runtime | None = None

    def __iter__(self) -> "BatchIterator":  # type: ignore[override]  # torch declares its own iterator class
        """Begin a new pass, and start to load."""
        return BatchIterator(self, self._runtime().begin())

    def __aiter__(self) -> "AsyncBatchIterator":
        """Begin a new pass for a coroutine; loading starts with the first ``await``."""
        return AsyncBatchIterator(self, self._runtime().begin())

    def __enter__(self) -> "DataLoader[T_co]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "DataLoader[T_co]":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all passes over this loader and its threads; a later ``iter()`` begins anew.

        Waits up to a second for threads; one that is stuck in a read ends when the read does. Any thread may
        call it, also while another waits for a batch, who then gets a
        :class:`~aioload.errors.LoaderClosedError`.
        """
        if self._runtime_or_none is not None:
            self._runtime_or_none.close()

    def stats(self) -> LoaderStats:
        """Return what has been loaded, and where the time went, since the loader was made."""
        return self._runtime().stats()

    def check_worker_number_rationality(self) -> None:
        """Do nothing: torch warns of too many worker processes here, and threads are not that."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments; nothing that is under way travels."""
        return {**self.__dict__, "_runtime_or_none": None}

    def _get_iterator(self) -> Any:
        return iter(self)

    def _runtime(self) -> Runtime:
        runtime = self._runtime_or_none
        if runtime is None or runtime.pid != os.getpid():
            runtime = Runtime(self._plan())
            self._runtime_or_none = runtime
            weakref.finalize(self, runtime.close)
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


class _PassHolder:
    """What both faces of a pass have in common. Dropping the last reference ends the pass."""

    def __init__(self, loader: DataLoader[Any], new: Pass) -> None:
        self._loader = loader  # keeps it, and so its slots and persistent threads, for as long as the pass
        self._pass = new
        self._closer = weakref.finalize(self, new.collected)

    def __len__(self) -> int:
        return len(self._loader)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._pass.run!r}>"

    def __reduce__(self) -> Any:
        message = f"{type(self).__name__} is at work and cannot be pickled or copied; pickle the DataLoader instead."
        raise TypeError(message)

    def _end(self) -> None:
        self._closer.detach()
        self._pass.close()


class BatchIterator(_PassHolder):
    """One pass over a loader, for ``for`` and ``next``. Any thread may call ``next``, several at once."""

    def __init__(self, loader: DataLoader[Any], new: Pass) -> None:
        super().__init__(loader, new)
        new.run.start()

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Any:
        """Return the next batch, which is the caller's, waiting until it is there.

        Raises:
            StopIteration: The pass is over.
            LoaderTimeoutError: It took longer than the loader's ``timeout``. Asking again goes on waiting.
            LoaderClosedError: The loader or this iterator was closed.
            ForkedIteratorError: The iterator was made before a fork, in the parent.
            BaseException: What the dataset, ``collate_fn`` or sampler raised for this batch. Asking again
                gives the batch after it.
        """
        batch = self._pass.run.next()
        if batch is Answer.OVER:
            self._end()
            raise StopIteration
        return batch

    def close(self) -> None:
        """End the pass. A thread that waits in ``next`` gets a :class:`~aioload.errors.LoaderClosedError`."""
        self._end()


class AsyncBatchIterator(_PassHolder):
    """One pass over a loader, for ``async for``. Several coroutines may await batches at once, of any loop."""

    def __init__(self, loader: DataLoader[Any], new: Pass) -> None:
        super().__init__(loader, new)
        self._started: concurrent.futures.Future[None] | None = None

    def __aiter__(self) -> "AsyncBatchIterator":
        return self

    async def __anext__(self) -> Any:
        """Return the next batch, which is the caller's; the event loop goes on meanwhile.

        Raises as :meth:`BatchIterator.__next__`, at the end ``StopAsyncIteration``. A cancelled call loses no batch.
        """
        if self._started is None:
            self._started = self._pass.start_on_loop()
        if not self._started.done():
            await asyncio.wrap_future(self._started)
        batch = await self._pass.run.anext()
        if batch is Answer.OVER:
            self._end()
            raise StopAsyncIteration
        return batch

    async def aclose(self) -> None:
        """End the pass."""
        self._end()


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
