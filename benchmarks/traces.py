"""Traces: when a device computed and when it copied, from the events of torch's profiler in Chrome's form."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

Interval: TypeAlias = "tuple[float, float]"
"""A start and an end, in microseconds."""

Event: TypeAlias = "dict[str, Any]"
"""One of ``traceEvents``: those with a duration have ``"ph": "X"``, and ``ts`` and ``dur`` in microseconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches of time as intervals in order that do not touch each other."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def common(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return what lies in both; each must be a :func:`union`."""
    found: list[Interval] = []
    i = j = 0
    while i < len(ones) and j < len(others):
        start, end = max(ones[i][0], others[j][0]), min(ones[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return how long they are together."""
    return sum(end - start for start, end in intervals)


def kernels(events: Iterable[Event]) -> list[Interval]:
    """Return when each kernel ran."""
    return [_interval(event) for event in events if event.get("ph") == "X" and event.get("cat") == "kernel"]


def copies_to_device(events: Iterable[Event]) -> list[Event]:
    """Return the copies from the host, whatever memory they come from."""
    return [
        event
        for event in events
        if event.get("ph") == "X" and event.get("cat") == "gpu_memcpy" and "HtoD" in event.get("name", "")
    ]


def steady(events: Sequence[Event], share: float) -> list[Event]:
    """Return what began once ``share`` of all kernels had begun: steps have as many each, so that is after some."""
    starts = sorted(start for start, _ in kernels(events))
    if not starts:
        return list(events)
    first = starts[min(len(starts) - 1, round(share * len(starts)))]
    return [event for event in events if event.get("ph") == "X" and float(event["ts"]) >= first]


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Return what a trace of steady steps says.

    ``window_ms`` is from the start of the first kernel to the end of the last; ``idle_share`` the part of it in which
    no kernel ran; ``copied_under_kernels_share`` the part of the time of copies to the device in which one did. Shares
    are ``None`` where there was nothing.
    """
    computing, copies = union(kernels(events)), copies_to_device(events)
    copying = union(map(_interval, copies))
    window = computing[-1][1] - computing[0][0] if computing else 0.0
    num_bytes = sum(int(event.get("args", {}).get("bytes", 0)) for event in copies)
    streams = {event.get("args", {}).get("stream") for event in copies}
    return {
        "window_ms": window / 1000,
        "num_kernels": len(kernels(events)),
        "idle_share": 1 - length(computing) / window if window else None,
        "num_copies": len(copies),
        "copied_mb": num_bytes / 1e6,
        "copying_ms": length(copying) / 1000,
        "copied_under_kernels_share": length(common(copying, computing)) / length(copying) if copying else None,
        "pinned_copies": sum("Pinned" in event["name"] for event in copies),
        "copy_streams": sorted(stream for stream in streams if stream is not None),
    }


def _interval(event: Event) -> Interval:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0))
