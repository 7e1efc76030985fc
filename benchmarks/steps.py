"""Steps: how long a training step takes beside a loader at work, by whom it is interrupted, and how long it waits."""

import itertools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from benchmarks.rivals import Epoch
from benchmarks.slow_rivals import Batches

WARMING_S = 0.3


class Step:
    """A training step of pure Python and fifty small torch operations, each of which gives up the interpreter once."""

    def __init__(self, num_loops: int = 14_000, num_operations: int = 50) -> None:
        self._num_loops, self._num_operations = num_loops, num_operations
        self._weights = torch.rand(64, 64)

    def __call__(self, batch: torch.Tensor) -> float:
        total = 0
        for number in range(self._num_loops):
            total += number * number % 7
        x = batch[:, :64]
        for _ in range(self._num_operations):
            x = torch.tanh(x @ self._weights)
        return float(x[0, 0]) + total


class Meter:
    """What was measured in a row's turns beside the time of a step."""

    def __init__(self) -> None:
        self.waits_ms: list[float] = []
        self.num_hand_overs: list[float] = []  # of the interpreter, and other waits within a step
        self.num_preemptions: list[float] = []

    def row(self) -> str:
        """Return the medians over the turns."""
        figures = (self.waits_ms, self.num_hand_overs, self.num_preemptions)
        return "  ".join(f"{statistics.median(each):10.2f}" for each in figures)


def forever(batch: torch.Tensor, pause_s: float = 0.0) -> Batches:
    """Lend one batch again and again, at once or after a pause."""

    def again() -> Iterator[torch.Tensor]:
        for each in itertools.repeat(batch):
            if pause_s:
                time.sleep(pause_s)
            yield each

    def batches() -> AbstractContextManager[Iterator[torch.Tensor]]:
        return nullcontext(again())

    return batches


def beside(batch: torch.Tensor, pause_s: float, work: Callable[..., None], *arguments: Any) -> Batches:
    """Lend one batch again and again, after a pause, while another process does ``work(ready, *arguments)``."""

    @contextmanager
    def batches() -> Iterator[Iterator[torch.Tensor]]:
        context = multiprocessing.get_context("forkserver")
        ready = context.Event()
        process = context.Process(target=work, args=(ready, *arguments), daemon=True)
        process.start()
        try:
            ready.wait()
            with forever(batch, pause_s)() as loader:
                yield loader
        finally:
            process.kill()
            process.join()

    return batches


def step_epoch(batches: Batches, step: Callable[[Any], object], meter: Meter, *, seconds: float) -> Epoch:
    """Clock a mean step, without the wait for its batch, over ``seconds`` that begin when the loader is at work."""

    def epoch() -> tuple[int, float]:
        steps: list[float] = []
        waits: list[float] = []
        used = [0, 0]
        with batches() as loader:
            start = asked = time.perf_counter()
            for batch in loader:
                before, began = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
                step(batch)
                ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
                if began - start > WARMING_S:
                    steps.append(ended - began)
                    waits.append(began - asked)
                    used[0] += after.ru_nvcsw - before.ru_nvcsw
                    used[1] += after.ru_nivcsw - before.ru_nivcsw
                if ended - start > WARMING_S + seconds:
                    break
                asked = time.perf_counter()
        meter.waits_ms.append(1000 * statistics.mean(waits))
        meter.num_hand_overs.append(used[0] / len(steps))
        meter.num_preemptions.append(used[1] / len(steps))
        return 1, statistics.mean(steps)

    return epoch
