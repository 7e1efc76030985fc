"""Copies: how fast batches get to a device, by a bare copy, by our copier, and by whole loaders."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data

import aioload
from aioload.copier import Copier
from aioload.layout import Layout
from aioload.ring import Ring
from benchmarks.cards import Card, using
from benchmarks.paired import Comparison, Rival, compare

NUM_ROWS = 64
NUM_DISTINCT_BATCHES = 4
MB = 1e6
BARE = "bare copy_ of a pinned buffer"
UNDER_WAY = 2
"""Copies that are issued and not waited for, in all ways but the loaders', which have settings of their own."""


@dataclass(frozen=True)
class Load:
    """Batches of ``NUM_ROWS`` samples, each a tuple of ``num_tensors`` arrays of bytes, ``batch_bytes`` in all."""

    batch_bytes: int
    num_tensors: int
    seconds: float

    @property
    def leaf_bytes(self) -> int:
        """Bytes of one array of one sample."""
        return self.batch_bytes // (NUM_ROWS * self.num_tensors)

    def samples(self) -> list[tuple[Any, ...]]:
        """Return samples in memory, more than the processor's caches hold."""
        rng, shape = np.random.default_rng(0), (NUM_DISTINCT_BATCHES * NUM_ROWS, self.num_tensors, self.leaf_bytes)
        return [tuple(row) for row in rng.integers(0, 256, shape, np.uint8)]


def compare_copies(card: Card, num_rounds: int, sizes: Sequence[int], seconds: float) -> list[Comparison]:
    """Compare ways to the device for batches of 1, 5 and 20 tensors."""
    comparisons = []
    for batch_bytes, num_tensors in itertools.product(sizes, (1, 5, 20)):
        load = Load(batch_bytes, num_tensors, seconds)
        title = f"copies: batches of {batch_bytes / MB:g} MB in {num_tensors} tensor{'s' * (num_tensors > 1)}"
        rivals, notes = those_that_run(ways(card, load))
        comparison = compare(title, rivals, num_rounds=num_rounds, unit="MB/s", num_warming=0)
        comparison.notes[:0] = notes
        comparisons.append(comparison)
    return comparisons


def shares_of_bare_copy(comparison: Comparison) -> dict[str, list[float]]:
    """Return each way's rate divided by that of the bare copy, round by round."""
    rates = {name: [amount / seconds for amount, seconds in epochs] for name, epochs in comparison.epochs.items()}
    bare = rates.pop(BARE, None)
    if bare is None:
        return {}
    return {name: [one / other for one, other in zip(each, bare, strict=True)] for name, each in rates.items()}


def ways(card: Card, load: Load) -> list[Rival]:
    """Return the ways, of which the first is what others are compared to: our copier with slots that are full."""
    samples = load.samples()
    rivals = [
        ("aioload's copier, full slots", lambda: copied_by_copier(card, load, samples[0])),
        (BARE, lambda: copied_barely(card, load)),
        ("to(non_blocking) of pinned tensors", lambda: copied_by_to(card, load)),
        ("aioload, batches that are there", lambda: loaded_whole(card, load)),
        ("aioload", lambda: loaded(card, load, ours(card, samples), num_warming=8)),
    ]
    for num_workers in (0, 8) if card.is_real else (0,):
        name = f"torch, {num_workers} workers, pin_memory, to"
        rivals.append((name, from_torch(card, load, samples, num_workers)))
    if spdl_transfer() is not None:
        rivals.append(("SPDL's transfer, in a thread", lambda: copied_by_spdl(card, load)))
    return [Rival(name=name, epoch=epoch, group=name) for name, epoch in rivals]


def those_that_run(rivals: Iterable[Rival]) -> tuple[list[Rival], list[str]]:
    """Try each once, which warms it up; return those that did not fail, and a note for each that did."""
    able, notes = [], []
    for rival in rivals:
        try:
            rival.epoch()
        except Exception as exc:  # such as of a shared memory that is too small for torch's workers
            notes.append(f"{rival.name} failed: {exc!r:.300}")
        else:
            able.append(rival)
    return able, notes


def bounded(load: Load, card: Card, issue: Callable[[], Any]) -> tuple[float, float]:
    """Issue copies for a while, few ahead of those that are done; return how many MB, and in how long.

    ``issue`` issues the copy of a batch and returns its event.
    """
    events: list[Any] = []
    num = 0
    card.synchronize()
    start = time.perf_counter()
    while num < 2 * UNDER_WAY or time.perf_counter() - start < load.seconds:
        if len(events) >= UNDER_WAY:
            events.pop(0).synchronize()
        events.append(issue())
        num += 1
    card.synchronize()
    return num * load.batch_bytes / MB, time.perf_counter() - start


def copied_barely(card: Card, load: Load) -> tuple[float, float]:
    """Copy one pinned buffer into one of the device again and again, on a side stream."""
    source, stream = card.backend.host_memory(load.batch_bytes), card.backend.new_stream()
    target = torch.empty(load.batch_bytes, dtype=torch.uint8, device=card.device)

    def issue() -> Any:
        with using(card, stream):
            target.copy_(source, non_blocking=True)
        return card.backend.record_event(stream)

    return bounded(load, card, issue)


def copied_by_to(card: Card, load: Load) -> tuple[float, float]:
    """Copy each tensor of a pinned batch by ``to``, on a side stream."""
    batch, stream = pinned_batch(card, load), card.backend.new_stream()

    def issue() -> Any:
        for tensor in batch:
            card.backend.copy(tensor, stream)
        return card.backend.record_event(stream)

    return bounded(load, card, issue)


def copied_by_copier(card: Card, load: Load, sample: tuple[Any, ...]) -> tuple[float, float]:
    """Copy slots as the loader does, without anybody filling them."""
    ring = Ring(new_memory=card.backend.host_memory)
    copier, layout = Copier(card.backend, ring), Layout.of(sample)
    assert layout is not None
    num_bytes = layout.offsets(NUM_ROWS)[1]

    def issue() -> Any:
        slot = ring.acquire(num_bytes)
        columns = layout.columns(slot.arena, NUM_ROWS)
        slot.seal()
        copied = copier.copy_slot(slot, layout, columns, NUM_ROWS)
        copier.receive(copied)
        return copied.event

    return bounded(load, card, issue)


def copied_by_spdl(card: Card, load: Load) -> tuple[float, float]:
    """Copy pageable tensors as SPDL means it: by a thread of their own, which waits for them."""
    transfer = spdl_transfer()
    assert transfer is not None
    batch = [torch.zeros(load.batch_bytes // load.num_tensors, dtype=torch.uint8) for _ in range(load.num_tensors)]
    num = 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(transfer, batch).result()
        start = time.perf_counter()
        futures = [pool.submit(transfer, batch) for _ in range(UNDER_WAY)]
        while time.perf_counter() - start < load.seconds:
            futures.pop(0).result()
            futures.append(pool.submit(transfer, batch))
            num += 1
        for future in futures:
            future.result()
            num += 1
        return num * load.batch_bytes / MB, time.perf_counter() - start


def spdl_transfer() -> Callable[[Any], Any] | None:
    """Return what copies a batch to the device in SPDL, if that is here."""
    try:
        import spdl.io
    except ImportError:
        return None
    found: Callable[[Any], Any] = getattr(spdl.io, "transfer_tensor_h2d", None) or spdl.io.transfer_tensor
    return found


def loaded_whole(card: Card, load: Load) -> tuple[float, float]:
    """Load batches that are pinned already: the loader's way but for reading and collation; each tensor is copied."""
    batches = [pinned_batch(card, load) for _ in range(NUM_DISTINCT_BATCHES)]
    loader: aioload.DataLoader[Any] = aioload.DataLoader(
        batches,
        batch_size=None,
        sampler=Endless(len(batches)),
        device=card.loader_device,
        collate_fn=lambda batch: batch,
    )
    return loaded(card, load, lambda: loader, num_warming=4)


def pinned_batch(card: Card, load: Load) -> list[torch.Tensor]:
    """Return tensors that copies are made from beside the host's work."""
    return [card.backend.host_memory(NUM_ROWS * load.leaf_bytes) for _ in range(load.num_tensors)]


class Endless(torch.utils.data.Sampler[int]):
    """All indices again and again."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(self.num))


def ours(card: Card, samples: Any, **arguments: Any) -> Callable[[], Any]:
    """Return what makes our loader of these samples."""

    def make() -> Any:
        return aioload.DataLoader(
            samples, NUM_ROWS, sampler=Endless(len(samples)), device=card.loader_device, **arguments
        )

    return make


class Sent:
    """torch's loader, and the copies to the device that its users write themselves."""

    def __init__(self, card: Card, loader: Any) -> None:
        self.card, self.loader = card, loader

    def __iter__(self) -> Iterator[Any]:
        device = self.card.device
        with closing(_Ending(iter(self.loader))) as batches:
            for batch in batches:
                yield [tensor.to(device, non_blocking=True) for tensor in batch]

    def close(self) -> None:
        """Nothing: the workers end with their iterator."""


class _Ending:
    """An iterator of torch's, of which the workers are ended at a certain time."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def close(self) -> None:
        end = getattr(self.batches, "_shutdown_workers", None)
        if end is not None:
            end()


def torchs(card: Card, samples: Any, num_workers: int, batch_size: int = NUM_ROWS) -> Callable[[], Any]:
    """Return what makes torch's loader of these samples."""

    def make() -> Any:
        loader: Any = torch.utils.data.DataLoader(
            samples, batch_size, sampler=Endless(len(samples)), num_workers=num_workers, pin_memory=card.is_real
        )
        return Sent(card, loader)

    return make


def from_torch(card: Card, load: Load, samples: Any, num_workers: int) -> Callable[[], tuple[float, float]]:
    """Return an epoch of torch's loader, clocked when what its workers began with has been taken."""
    return lambda: loaded(card, load, torchs(card, samples, num_workers), num_warming=max(2, 2 * num_workers))


def loaded(card: Card, load: Load, make: Callable[[], Any], num_warming: int) -> tuple[float, float]:
    """Take batches from a new loader for a while, after the first few; return how many MB, and in how long."""
    num = 0
    with closing(make()) as loader, closing(iter(loader)) as batches:
        for _ in range(num_warming):
            batch = next(batches)
        card.synchronize()
        start = time.perf_counter()
        while num < NUM_DISTINCT_BATCHES or time.perf_counter() - start < load.seconds:
            batch = next(batches)
            num += 1
        card.synchronize()
        seconds = time.perf_counter() - start
        del batch
    return num * load.batch_bytes / MB, seconds
