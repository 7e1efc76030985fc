"""A paired comparison: rivals take turns in one process, and only figures of the same round are divided.

A shared machine speeds up and slows down over minutes. Rivals that run one after another within seconds meet
the same machine, so the ratio of a round is steadier than either of its figures.
"""

import gc
import multiprocessing
import os
import platform
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

EXIT_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One way of loading.

    Attributes:
        name: Its row in the table.
        epoch: Loads once, keeps the clock itself, and returns the number of samples, or of other things, and seconds.
        group: Rivals of a group are one way of loading with different settings; the summary takes the best.
    """

    name: str
    epoch: Callable[[], tuple[float, float]]
    group: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What every round measured. The first rival is ours; the others are compared to it.

    Attributes:
        title: What was loaded.
        unit: ``"samples/s"``, another amount a second, or ``"ms"`` where an epoch is a single wait.
        groups: The group of each rival.
        epochs: The epochs of each rival in the order of the rounds, as pairs of samples and seconds.
        notes: What a rival left behind after an epoch.
    """

    title: str
    unit: str
    groups: dict[str, str]
    epochs: dict[str, list[tuple[float, float]]]
    notes: list[str] = field(default_factory=list)

    @property
    def ours(self) -> str:
        """The name of the first rival."""
        return next(iter(self.epochs))

    def figure(self, name: str) -> float:
        """Return the median over the rounds, in ``unit``."""
        if self.unit == "ms":
            return statistics.median(1000 * seconds for _, seconds in self.epochs[name])
        return statistics.median(self._speeds(name))

    def speedups(self, name: str) -> list[float]:
        """Return our speed divided by the rival's, round by round."""
        return [ours / theirs for ours, theirs in zip(self._speeds(self.ours), self._speeds(name), strict=True)]

    def best_of_groups(self) -> dict[str, str]:
        """Return the rival of each group, ours left out, whose median speed is the highest."""
        best: dict[str, str] = {}
        for name, group in self.groups.items():
            if name != self.ours and (group not in best or self._median(name) > self._median(best[group])):
                best[group] = name
        return best

    def table(self) -> str:
        """Return the figures as plain text."""
        best = self.best_of_groups()
        settings = Counter(self.groups.values())
        summary = {f"best of {group}": name for group, name in best.items() if settings[group] > 1}
        width = max(map(len, [*self.epochs, *summary]))
        lines = [self.title, f"  {'':{width}}  {self.unit:>11}  {'speedup':>8}  (min - max)"]
        lines += [f"  {name:{width}}  {self._row(name)}" for name in self.epochs]
        lines += [f"  {label:{width}}  {self._row(name)}  {name}" for label, name in summary.items()]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def as_json(self) -> dict[str, Any]:
        """Return the figures, and the rounds they come from, as JSON knows them."""
        rows = {
            name: {
                "group": self.groups[name],
                "median": self.figure(name),
                "speedups": self.speedups(name),
                "median_speedup": statistics.median(self.speedups(name)),
                "epochs": [{"samples": samples, "seconds": seconds} for samples, seconds in epochs],
            }
            for name, epochs in self.epochs.items()
        }
        best = self.best_of_groups()
        return {"title": self.title, "unit": self.unit, "rivals": rows, "best": best, "notes": self.notes}

    def _speeds(self, name: str) -> list[float]:
        return [samples / seconds for samples, seconds in self.epochs[name]]

    def _row(self, name: str) -> str:
        figure = f"{self.figure(name):11,.1f}" if self.unit == "ms" else f"{self.figure(name):11,.0f}"
        if name == self.ours:
            return figure
        speedups = self.speedups(name)
        return f"{figure}  {statistics.median(speedups):8.2f}  ({min(speedups):.2f} - {max(speedups):.2f})"

    def _median(self, name: str) -> float:
        return statistics.median(self._speeds(name))


def compare(
    title: str, rivals: Sequence[Rival], *, num_rounds: int, unit: str = "samples/s", num_warming: int = 1
) -> Comparison:
    """Let the rivals take turns, A B C A B C ..., for rounds of warming up and ``num_rounds`` that count."""
    groups = {rival.name: rival.group for rival in rivals}
    epochs: dict[str, list[tuple[float, float]]] = {rival.name: [] for rival in rivals}
    notes: dict[str, None] = {}
    for number in range(1 - num_warming, num_rounds + 1):
        for rival in rivals:
            _progress(f"{title}: round {number} of {num_rounds}, {rival.name}")
            threads = set(threading.enumerate())
            gc.collect()
            epoch = rival.epoch()
            gc.collect()
            notes.update(dict.fromkeys(f"{rival.name} left {thing}" for thing in _left_behind(threads)))
            if number > 0:
                epochs[rival.name].append(epoch)
    _progress("")
    return Comparison(title=title, unit=unit, groups=groups, epochs=epochs, notes=list(notes))


def spread(values: Sequence[float]) -> str:
    """Return the median, the least and the greatest as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def machine() -> dict[str, Any]:
    """Return where the figures come from."""
    return {
        "platform": platform.platform(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _left_behind(threads_before: Iterable[threading.Thread]) -> list[str]:
    """Return what an epoch started and did not end, after a grace for what is just ending."""
    left = set(threading.enumerate()) - set(threads_before)
    for thread in left:
        thread.join(EXIT_GRACE_S)
    names = [f"thread {thread.name!r}" for thread in left if thread.is_alive()]
    return names + [f"process {process.name!r}" for process in multiprocessing.active_children()]


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
