"""The loader: torch's DataLoader by its arguments and attributes, our engine by its work."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast

import torch
import torch.utils.data as torch_data

from aioload.arguments import (
    check_device_transform,
    check_iterable_workers,
    check_on_error,
    check_prefetch_factor,
    check_processes,
    check_timeout,
    loader_seed,
    reads_number,
    say_once_that_there_are_no_processes,
    usable_cores,
    warn_of_pinning,
    whole_number,
)
from aioload.cache import Cache
from aioload.device import resolve_device
from aioload.engine import aside, resume
from aioload.engine.epochs import Epochs, epoch_of, innermost, seekable_in
from aioload.engine.passes import Pass
from aioload.engine.plan import Plan, plan_of
from aioload.engine.protocol import check_cache, check_read, check_reader
from aioload.engine.replay import put_back_epochs
from aioload.engine.runtime import Runtime
from aioload.engine.server import start_server
from aioload.engine.tolerance import ErrorLog, OnError, Tolerance
from aioload.errors import ArgumentError, SampleError
from aioload.iterators import AsyncBatchIterator, BatchIterator
from aioload.readers import Reader, ReadPolicy
from aioload.readers.policy import policy_or_default
from aioload.samplers import ShuffleSampler
from aioload.stats import LoaderStats
from aioload.types import MapDataset, StagedDataset

T_co = TypeVar("T_co", covariant=True)

_FIXED = frozenset({"cache", "device", "device_transform", "iterable_workers", "processes", "reader", "seed"})


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
        num_workers: Threads that run dataset code; by default one per usable core, or more if there are more
            ``processes``. With 0 there are no threads and no look-ahead: everything runs in the consumer's thread,
            when it asks.
        collate_fn: Makes a batch of a list of samples, on a loading thread.
        pin_memory: Whether CPU batches are in page-locked memory. Where torch sees no accelerator, or one on which it
            does not pin (``mps``), this does nothing, and says so, once.
        drop_last: Whether an incomplete last batch is left out.
        timeout: Seconds to wait for a batch before :class:`~aioload.errors.LoaderTimeoutError`; 0 waits for ever.
        worker_init_fn: Called with its number in each of the ``num_workers`` threads before its first sample; for an
            iterable dataset, once for each of its ``iterable_workers``.
        multiprocessing_context: How ``processes`` are started: ``"forkserver"`` (the default), ``"spawn"``, ``"fork"``
            or such a context. Checked and kept, and without effect, where there are none.
        generator: Source of the random order.
        prefetch_factor: Batches loaded ahead per worker thread, so ``prefetch_factor * num_workers`` in all. More
            where that would be fewer samples than the reads under way need, fewer where ``prefetch_bytes`` do
            not hold them.
        persistent_workers: Whether threads outlive a pass. The next pass then begins to load while the present
            one ends, if the sampler is one of torch's. It begins anew if by then a generator, the sampler,
            dataset or collate_fn, or what they are made of, has changed (of large arrays a part is looked at).
        pin_memory_device: Kept and without effect, as in torch, with a warning; the current accelerator is used.
        in_order: Whether batches come in the sampler's order; ``False`` yields each when it is ready.
        device: Where batches arrive. For a CUDA device, or another that ``torch.accelerator`` serves, the copy runs on
            a stream of the loader's own, and the stream that is current at ``next()`` waits for it, not the host. A
            name without a number, such as ``"cuda"``, is the current device, or in a process that has chosen none and
            has a ``LOCAL_RANK``, as torchrun sets it, that one. To a device without streams, such as ``"mps"``,
            batches are copied by ``next()``, with a warning. For tests, a
            :class:`~aioload.testing.SimulatedDevice`, or what :class:`~aioload.device.DeviceBackend` says.
        seed: Fixes the order of ``shuffle=True``, which is then that of a :class:`~aioload.samplers.ShuffleSampler`,
            and what :func:`~aioload.randomness.sample_rng` gives, from 0 to 2**64 - 1. Without it both follow from
            torch's generators, as in torch.
        num_concurrent_reads: Reads in flight over all batches, for datasets with ``location`` and ``decode``, or
            samples awaited at once for async ones. ``"auto"`` finds how many bring the most, from 16 on and up to 256
            (less where this process may not open twice as many files), and follows when the storage changes; fewer
            while the consumer does not wait. ``stats().reads_limit`` tells how many. A number is a fixed bound. Fewer
            are under way in any case when they are so short that threads would only contend for the interpreter.
        iterable_workers: Iterators over an ``IterableDataset``, which see the worker numbers 0 to
            ``iterable_workers - 1`` and must each yield a part of it, as for torch's workers. Each of several goes
            over a deep copy. They take turns, batch by batch.
        on_error: What is done when a sample cannot be read, decoded or fetched (an ``Exception``): ``"raise"`` it for
            the batch; ``"skip"`` the sample, so that the batch is smaller, or left out if nothing remains;
            ``"replace"`` it by the one before it in the batch, or else the first good one behind it; or call a function
            with the exception, in the thread that loaded, and take the sample that it returns (what it raises counts
            as the sample's error). See :meth:`errors`. Not for an ``IterableDataset``, which cannot go on.
        max_errors: How many samples of one pass may be skipped or replaced, a number, or a float below 1 for a share of
            the dataset; beyond, :class:`~aioload.errors.TooManyErrorsError`. ``None`` is no bound, but a pass
            that has no batch at all for errors raises it too.
        read: What is done about reads that fail, for datasets with ``location`` and ``decode``; by default those that
            may succeed a little later are tried three times more.
        reader: Fetches the bytes of a dataset with ``location`` and ``decode``: a
            :class:`~aioload.readers.SchemeReader` unless given, for paths and URLs. Its ``read(location)`` runs on the
            read threads, or if it is ``async def`` on the loader's event loop. The loader does not close it. See
            :class:`~aioload.readers.Reader`.
        cache: Keeps what is read for a dataset with ``location`` and ``decode``, so that later epochs need not read it
            again: a :class:`~aioload.cache.DiskCache`, a :class:`~aioload.cache.MemoryCache`, or what
            :class:`~aioload.cache.Cache` says. ``decode`` then gets ``bytes``, whatever the reader returns. Several
            loaders may share one; the loader does not close or clear it.
        device_transform: Called with each batch on the ``device``, and returns what is handed out, dense tensors in
            lists, tuples, dicts, dataclasses and the like: for what the device does best, such as normalising images.
            It runs on the loader's thread, ahead of you, with the stream of the copies current. It must not wait for
            the device nor return the same memory twice, and has to wait itself for what other streams compute. (In your
            thread and stream where ``num_workers=0``, or where sparse tensors or objects with a ``to`` are in it.)
        num_device_batches: Batches that a pass may have on the ``device`` before you ask for them, and copies to it
            that may be under way. Further ones wait in the host's memory, and all while the device is more than four
            batches behind you. Without ``device`` or with ``num_workers=0``,
            which loads nothing ahead, it has no effect.
        prefetch_bytes: How many bytes may be in flight, from the read to the hand-over of the batch; by default a
            quarter of the memory that is available when a pass begins, limits of control groups included.
        processes: Processes that load in place of threads of this one, each with its part of the ``num_workers``
            threads and of the reads, so that neither Python code of the dataset nor reading takes this process's
            interpreter. Batches come in memory that both processes see, and are not copied. The dataset, and what else
            loads, is pickled once for each of them when they begin: with each pass, or, with ``persistent_workers``,
            once. Exceptions come as copies, with the traceback as a note. An ``IterableDataset`` is passed over by one
            of them. 0 is for none.

    Raises:
        ArgumentError: An argument cannot work (it is a ``ValueError``).
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
        num_concurrent_reads: int | Literal["auto"] = "auto",
        iterable_workers: int = 1,
        on_error: OnError = "raise",
        max_errors: float | None = None,
        read: ReadPolicy | None = None,
        reader: Reader | None = None,
        cache: Cache | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        num_device_batches: int = 2,
        prefetch_bytes: int | None = None,
        processes: int = 0,
    ) -> None:
        processes = whole_number("processes", processes, 0)
        num_workers = max(usable_cores(), processes) if num_workers is None else num_workers
        check_timeout(timeout, num_workers)
        check_prefetch_factor(prefetch_factor, num_workers)
        num_concurrent_reads = reads_number(num_concurrent_reads)
        iterable_workers = whole_number("iterable_workers", iterable_workers, 1)
        num_device_batches = whole_number("num_device_batches", num_device_batches, 1)
        check_iterable_workers(iterable_workers, dataset)
        check_on_error(on_error, max_errors, dataset)
        is_batched = batch_size is not None or batch_sampler is not None
        check_reader(reader, dataset, batched=is_batched)
        check_cache(cache, dataset, batched=is_batched)
        check_read(read, dataset, batched=is_batched)
        if prefetch_bytes is not None:
            prefetch_bytes = whole_number("prefetch_bytes", prefetch_bytes, 1)
        check_processes(processes, num_workers, dataset)
        seed = loader_seed(seed, generator)
        is_ours = shuffle and sampler is None and batch_sampler is None
        if seed is not None and is_ours and not isinstance(dataset, torch_data.IterableDataset):  # torch says no
            sampler, shuffle = ShuffleSampler(cast("Any", dataset), seed), None
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
            multiprocessing_context,
            generator,
            prefetch_factor=factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if multiprocessing_context is not None and processes == 0:
            say_once_that_there_are_no_processes()
        if processes > 0:
            start_server(self.multiprocessing_context)
        self.device, self.num_device_batches = resolve_device(device), num_device_batches
        self.device_transform = device_transform
        check_device_transform(device_transform, self.device)
        self.num_concurrent_reads: int | Literal["auto"] = num_concurrent_reads
        self.prefetch_bytes, self.processes = prefetch_bytes, processes
        self.seed, self.iterable_workers = seed, iterable_workers
        self.reader, self.cache = reader, cache
        self.on_error, self.max_errors = on_error, max_errors
        self.read = policy_or_default(read)
        self._errors = ErrorLog()
        self._runtimes: dict[int, Runtime] = {}  # by process: a forked child makes its own
        self._epochs = Epochs()
        self._epoch_told: int | None = None  # to the dataset, by set_epoch
        self._latest: resume.Record | None = None  # of the pass that began last, unless an epoch was set since
        self._saved: dict[str, Any] | None = None  # a loaded state that no pass has gone on with yet
        self._epoch_at_load: int | None = None  # the sampler's own
        self._warned_of_pinning = False
        self._is_fixed = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless it is one that passes, or saved states, depend on.

        Raises:
            ValueError: As torch's DataLoader, and for ``device``, ``device_transform``, ``seed``, ``iterable_workers``,
                ``reader`` and ``cache``.
        """
        if name in _FIXED and self.__dict__.get("_is_fixed", False):
            message = f"{name} attribute should not be set after {type(self).__name__} is initialized"
            raise ArgumentError(message)
        super().__setattr__(name, value)

    def __iter__(self) -> "BatchIterator":  # type: ignore[override]  # torch declares its own iterator class
        """Begin a new pass, or go on with the one whose state was loaded, and start to load."""
        return BatchIterator(self, self._begin())

    def __aiter__(self) -> "AsyncBatchIterator":
        """Begin a new pass for a coroutine, as :meth:`__iter__`; loading starts with the first ``await``."""
        return AsyncBatchIterator(self, self._begin())

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
        return dataclasses.replace(self._runtime().stats(), errors=self._errors.count)

    def errors(self) -> list[SampleError]:
        """Return the samples that batches went without, by the order of the batches: see ``on_error``.

        They are those of all passes since the loader was made, the latest 10,000 of them; ``stats().errors`` has the
        number. What has been loaded ahead is not among them yet. Any thread may call it.
        """
        return self._errors.records()

    @property
    def tolerance(self) -> Tolerance | None:
        """What is done about samples that fail, ``None`` where an error ends the loop."""
        if self.on_error == "raise":
            return None
        allowed = self.max_errors
        if isinstance(allowed, float):
            allowed = int(allowed * len(self.dataset))  # type: ignore[arg-type]  # checked
        return Tolerance(self.on_error, allowed, self._errors)

    @property
    def declared_items(self) -> int | None:
        """What an iterable dataset said that its length is, if ``len(loader)`` has asked it."""
        return self._IterableDataset_len_called

    @property
    def epoch_told(self) -> int | None:
        """What :meth:`set_epoch` was last called with, ``None`` if it was not."""
        return self._epoch_told

    @property
    def num_yielded(self) -> int:
        """Batches of the present epoch that have been handed out, before a resume too; 0 between epochs."""
        if self._saved is not None:
            return int(self._saved["num_yielded"])
        return 0 if self._latest is None or self._latest.position.is_over else self._latest.position.num_yielded

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``, and tell the sampler and the dataset where they have a ``set_epoch``.

        Epochs count by themselves otherwise. A loaded state of this very epoch is still gone on with; one from within
        another epoch is dropped.

        Raises:
            ArgumentError: ``epoch`` is no whole number from 0 up.
        """
        epoch = whole_number("epoch", epoch, 0)
        self._tell_epoch(epoch)
        self._latest = None
        self._go_over(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the pass that began last is, to go on from there in this loader or in another, elsewhere.

        It counts the batches that have been handed out; what was loaded ahead of them will be loaded again. To be
        called between two ``next()``, or between epochs: then it is the start of the next one. It can be written as
        JSON, unless a sampler or dataset with a ``state_dict`` of its own puts something else into it, and takes a few
        hundred bytes for aioload's samplers and torch's; about 4.3 KB more for each ``torch.Generator`` that has been
        drawn from, twice that where others draw from it too.

        torch's global generator is not in it. Where epochs are shuffled by it (no ``seed``, no ``generator``), the
        order of this epoch comes back, and that of later ones if you save ``torch.get_rng_state()`` as well.
        """
        if self._saved is not None:
            return resume.checked(self._saved, self._saved["fits"])
        if self._latest is not None and not self._latest.position.is_over:
            return self.state_of(self._latest)
        sampler, runtime = self._index_sampler, self._runtimes.get(os.getpid())
        start = resume.start_of(
            self._epochs.next(sampler),
            self.dataset,
            sampler,
            self.generator,
            num_lanes=self.iterable_workers,
            base_seed=runtime.base_seed if runtime is not None and self.persistent_workers else None,
        )
        return self._completed(start)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` go on where a state was saved, with the very next batch.

        Neither the number of workers nor of reads matters. Samplers that can begin anywhere, aioload's own and
        torch's sequential one, do so at once; torch's others draw their indices again. No sample of the batches before
        is loaded, except from an iterable dataset without ``state_dict`` and ``load_state_dict``, with a warning.

        Raises:
            StateError: The state does not fit (another length of the dataset, batch size, sampler, seed); the message
                lists the differences. It is a ``ValueError``. ``iter()`` raises it where a sampler that is neither ours
                nor torch's draws other indices than it did before.
        """
        saved = resume.checked(state_dict, self._fits())
        if "epoch_told" in saved:
            self._tell_epoch(saved["epoch_told"])  # which may be that of an earlier pass
            if (seekable := seekable_in(self._index_sampler)) is not None:
                seekable.set_epoch(saved["epoch"])
        if resume.is_start(saved):
            put_back_epochs(self._index_sampler, saved["sampler"])
        self._saved, self._latest = saved, None
        self._epoch_at_load = epoch_of(self._index_sampler)

    def state_of(self, record: resume.Record) -> dict[str, Any]:
        """Return the state of one pass; see ``state_dict()`` of the iterators."""
        return self._completed(record.state())

    def check_worker_number_rationality(self) -> None:
        """Do nothing: torch warns of too many worker processes here; ``num_workers`` counts threads."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments; nothing that is under way travels."""
        return {**self.__dict__, "_runtimes": {}, "_latest": None}

    def _get_iterator(self) -> Any:
        return iter(self)

    def _begin(self) -> Pass:
        check_prefetch_factor(self.prefetch_factor, self.num_workers)  # both may have been set since
        if not self._warned_of_pinning:
            warn_of_pinning(self.pin_memory, self.pin_memory_device)
            self._warned_of_pinning = True
        epoch = epoch_of(self._index_sampler)
        if epoch is not None and epoch != self._epoch_at_load:  # it was set on the sampler
            self._go_over(epoch)
        saved = self._saved
        if saved is not None and (num_items := resume.num_items_again(saved)):
            warnings.warn(
                f"{type(self.dataset).__name__} has no state_dict and load_state_dict, so the {num_items} items before "
                "the saved place are loaded again and dropped.",
                UserWarning,
                stacklevel=3,  # the line of the loop
            )
        plan = plan_of(self, self._epochs)
        new = self._runtime(plan).begin(plan, saved)
        self._saved, self._latest = None, new.run.record
        return new

    def _go_over(self, epoch: int) -> None:
        """Have a loaded state be of ``epoch``, if it is of a start, or else drop it."""
        if self._saved is None or self._saved["epoch"] == epoch:
            return
        self._saved = {**self._saved, "epoch": epoch} if resume.is_start(self._saved) else None

    def _tell_epoch(self, epoch: int) -> None:
        sampler = self._index_sampler
        inner = innermost(sampler)
        runtime = self._runtimes.get(os.getpid())
        with contextlib.nullcontext() if runtime is None else runtime.telling_epoch():
            self._epochs.set(epoch, *([inner] if inner is sampler else [inner, sampler]), self.dataset)
        self._epoch_told = epoch

    def _fits(self) -> dict[str, Any]:
        found: dict[str, Any] = resume.what_must_fit(
            self.dataset,
            self._index_sampler,
            self.generator,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            seed=self.seed,
            iterable_workers=self.iterable_workers,
        )
        return found

    def _completed(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._epoch_told is not None:
            state["epoch_told"] = self._epoch_told
        return resume.completed(state, self._fits())

    def _runtime(self, plan: Plan | None = None) -> Runtime:
        runtime = self._runtimes.get(os.getpid())
        if runtime is None:  # two threads may get here at once: one of theirs is taken, by both
            new = Runtime(plan or plan_of(self, self._epochs))
            runtime = self._runtimes.setdefault(os.getpid(), new)
            if runtime is new:
                runtime.close_with(self)
        return runtime
