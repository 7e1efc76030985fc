"""Memory of the device for each batch: from torch's allocator, or two buffers that are used in turn."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.cards import Card, using
from benchmarks.gpu_copies import MB, UNDER_WAY
from benchmarks.paired import Comparison, Rival, compare


def compare_rings(card: Card, num_rounds: int, sizes: Sequence[int], num_batches: int) -> list[Comparison]:
    """Compare memory from torch's allocator for each batch with two buffers of the device that are used in turn."""
    comparisons = []
    for batch_bytes in sizes:
        for unit, figure in (("MB/s", 1), ("ms", 2)):
            what = "rate" if unit == "MB/s" else "the host's time for a batch"
            rivals = [
                Rival(name=name, group=name, epoch=lambda way=way, figure=figure: _figure(way(), figure))  # type: ignore[misc]
                for name, way in (
                    ("allocator and record_stream", lambda n=batch_bytes: by_allocator(card, n, num_batches)),
                    ("two buffers and events", lambda n=batch_bytes: by_buffers(card, n, num_batches)),
                )
            ]
            title = f"ring: batches of {batch_bytes / MB:g} MB, {what}"
            comparisons.append(compare(title, rivals, num_rounds=num_rounds, unit=unit))
    return comparisons


def _figure(measured: tuple[float, float, float], which: int) -> tuple[float, float]:
    return (measured[0], measured[1]) if which == 1 else (1, measured[2])


def by_allocator(card: Card, batch_bytes: int, num_batches: int) -> tuple[float, float, float]:
    """Give each batch memory of its own; return MB, seconds, and the host's seconds for a batch."""
    backend, side = card.backend, card.backend.new_stream()
    source, current = backend.host_memory(batch_bytes), backend.current_stream()

    def issue() -> Any:
        copied = backend.copy(source, side)
        event = backend.record_event(side)
        backend.wait_event(current, event)
        backend.record_stream(copied, current)
        copied.max()
        return event

    return _host_timed(card, batch_bytes, num_batches, issue)


def by_buffers(card: Card, batch_bytes: int, num_batches: int) -> tuple[float, float, float]:
    """Give two buffers to batches in turn, the copy waiting for who used one last; return what the other does."""
    backend, side = card.backend, card.backend.new_stream()
    source, current = backend.host_memory(batch_bytes), backend.current_stream()
    buffers = [torch.empty(batch_bytes, dtype=torch.uint8, device=card.device) for _ in range(UNDER_WAY)]
    used = [backend.record_event(current) for _ in buffers]
    numbers = itertools.cycle(range(len(buffers)))

    def issue() -> Any:
        number = next(numbers)
        backend.wait_event(side, used[number])
        with using(card, side):
            buffers[number].copy_(source, non_blocking=True)
        event = backend.record_event(side)
        backend.wait_event(current, event)
        buffers[number].max()
        used[number] = backend.record_event(current)
        return event

    return _host_timed(card, batch_bytes, num_batches, issue)


def _host_timed(card: Card, batch_bytes: int, num_batches: int, issue: Callable[[], Any]) -> tuple[float, float, float]:
    events: list[Any] = []
    host_s = 0.0
    card.synchronize()
    start = time.perf_counter()
    for _ in range(num_batches):
        if len(events) >= UNDER_WAY:
            events.pop(0).synchronize()
        before = time.perf_counter()
        events.append(issue())
        host_s += time.perf_counter() - before
    card.synchronize()
    return num_batches * batch_bytes / MB, time.perf_counter() - start, host_s / num_batches
