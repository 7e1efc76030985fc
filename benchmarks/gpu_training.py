"""Training: how much longer a step takes when a loader feeds it than when one batch is used again and again."""

import io
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import aioload
from benchmarks.cards import Card
from benchmarks.gpu_copies import Endless, Sent, those_that_run
from benchmarks.gpu_steps import NUM_CLASSES, Step, network_step, short_step
from benchmarks.paired import Comparison, Rival, compare, spread
from benchmarks.traces import steady, summary

JPEG_SIZE = (500, 375)
CACHED = "one batch, used again"

Make = Callable[[], Any]
"""Makes a loader whose batches are on the device, and which has a ``close``."""


class Images:
    """Images in memory, and their classes: samples that cost next to nothing."""

    def __init__(self, num: int, size: int) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (num, 3, size, size), np.uint8)
        self.labels = [int(label) for label in rng.integers(NUM_CLASSES, size=num)]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], self.labels[index]


class Decode:
    """Decodes a JPEG to an array of (3, size, size) bytes, and gives it a class."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, data: bytes, index: int) -> tuple[Any, int]:
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)), index % NUM_CLASSES


def write_jpegs(folder: Path, num: int) -> list[str]:
    """Write pictures of 500 x 375, of soft shapes and some noise, about 40 KB each; return their paths."""

    def write(number: int) -> str:
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        shapes = coarse.resize(JPEG_SIZE, Image.Resampling.BICUBIC)
        noise = rng.integers(-12, 13, (JPEG_SIZE[1], JPEG_SIZE[0], 3), np.int16)
        path = folder / f"{number:05d}.jpg"
        Image.fromarray((np.asarray(shapes) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=85)
        return str(path)

    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(write, range(num)))
    for path in paths:  # so that it is in the page cache
        Path(path).read_bytes()
    return paths


class Workload:
    """A step, the samples it is fed, and how many steps are clocked in a round."""

    def __init__(self, name: str, step: Step, dataset: Any, batch_size: int, num_steps: int) -> None:
        self.name, self.step, self.dataset = name, step, dataset
        self.batch_size, self.num_steps = batch_size, num_steps
        self.num_warming = max(3, num_steps // 4)

    def feeders(self, card: Card, num_workers: Iterable[int]) -> dict[str, Make]:
        """Return ways to feed the step, ours first."""
        feeders: dict[str, Make] = {
            "aioload": lambda: self.ours(card),
            "aioload, 1 process": lambda: self.ours(card, processes=1),
            CACHED: lambda: self.cached(card),
        }
        for num in num_workers:
            feeders[f"torch, {num} workers"] = lambda num=num: self.torchs(card, num)  # type: ignore[misc]
        return feeders

    def ours(self, card: Card, processes: int = 0) -> Any:
        """Return our loader, as it is without other settings."""
        return aioload.DataLoader(
            self.dataset,
            self.batch_size,
            sampler=Endless(len(self.dataset)),
            device=card.loader_device,
            processes=processes,
        )

    def torchs(self, card: Card, num_workers: int) -> Any:
        """Return torch's loader as its users write it."""
        loader: Any = torch.utils.data.DataLoader(
            self.dataset,
            self.batch_size,
            sampler=Endless(len(self.dataset)),
            num_workers=num_workers,
            pin_memory=card.is_real,
        )
        return Sent(card, loader)

    def cached(self, card: Card) -> "Cached":
        """Return what gives the first batch for ever."""
        samples = [self.dataset[index] for index in range(self.batch_size)]
        batch: list[torch.Tensor] = torch.utils.data.default_collate(samples)
        return Cached([tensor.to(card.device) for tensor in batch])


class Cached:
    """One batch on the device, again and again."""

    def __init__(self, batch: list[torch.Tensor]) -> None:
        self.batch = batch

    def __iter__(self) -> Any:
        while True:
            yield self.batch

    def close(self) -> None:
        """Nothing is left."""


def workloads(card: Card, names: Iterable[str], folder: Path) -> Iterable[Workload]:
    """Make the workloads of these names, one after the other, so that one network at a time is on the device."""
    size = 224 if card.is_real else 16
    for name in names:
        if name == "network, arrays":
            yield Workload(name, network_step(card), Images(1024 if card.is_real else 8, size), *_much(card))
        elif name == "network, jpeg":
            paths = write_jpegs(folder, 1024 if card.is_real else 8)
            yield Workload(name, network_step(card), aioload.FileDataset(paths, Decode(size)), *_much(card))
        else:
            dataset = Images(1024 if card.is_real else 8, size)
            yield Workload(name, short_step(card), dataset, *((16, 400) if card.is_real else (2, 4)))


WORKLOADS = ["network, arrays", "network, jpeg", "1 ms, arrays"]


def _much(card: Card) -> tuple[int, int]:
    return (128, 16) if card.is_real else (2, 2)


def compare_steps(card: Card, work: Workload, num_rounds: int, feeders: dict[str, Make]) -> Comparison:
    """Clock the steps that each way feeds."""
    rivals = [
        Rival(
            name=name,
            epoch=lambda make=make: clocked(card, work, make),  # type: ignore[misc]
            group="torch" if name.startswith("torch") else name,
        )
        for name, make in feeders.items()
    ]
    able, notes = those_that_run(rivals)
    title = f"step: {work.name}, batches of {work.batch_size}"
    comparison = compare(title, able, num_rounds=num_rounds, unit="ms", num_warming=0)
    comparison.notes[:0] = notes
    return comparison


def clocked(card: Card, work: Workload, make: Make) -> tuple[float, float]:
    """Feed a new loader's batches to the step; return 1 and the seconds of a step, the first few left out."""
    with closing(make()) as loader, closing(iter(loader)) as batches:
        feed(work, batches, work.num_warming)
        card.synchronize()
        start = time.perf_counter()
        feed(work, batches, work.num_steps)
        card.synchronize()
        return 1, (time.perf_counter() - start) / work.num_steps


def feed(work: Workload, batches: Any, num_steps: int) -> None:
    """Take batches and do a step with each."""
    for images, labels in islice(batches, num_steps):
        work.step(images, labels)


def overheads(comparison: Comparison) -> dict[str, list[float]]:
    """Return by how much each way's step is longer than with one batch, as a share of that, round by round."""
    if CACHED not in comparison.epochs:
        return {}
    least = [seconds for _, seconds in comparison.epochs[CACHED]]
    return {
        name: [seconds / at_least - 1 for (_, seconds), at_least in zip(epochs, least, strict=True)]
        for name, epochs in comparison.epochs.items()
        if name != CACHED
    }


def overhead_lines(comparison: Comparison) -> list[str]:
    """Return them as text, in percent."""
    return [
        f"  overhead of {name}: {spread([100 * share for share in shares])} %"
        for name, shares in overheads(comparison).items()
    ]


def traced(card: Card, work: Workload, make: Make, path: Path | None = None) -> dict[str, Any]:
    """Return what a trace says of a new loader's steps, the first few left out; the trace goes to ``path``, if any.

    They are all in one trace: to begin one takes so long that a slow loader would have batches in store by then.
    """
    num_steps = min(work.num_steps, 100)

    def go() -> None:
        with closing(make()) as loader, closing(iter(loader)) as batches:
            feed(work, batches, work.num_warming + num_steps)

    share = work.num_warming / (work.num_warming + num_steps)
    return summary(steady(card.profile(go, path), share if card.is_real else 0.25))


def idle_shares(card: Card, work: Workload, feeders: dict[str, Make], num_traces: int) -> dict[str, Any]:
    """Return for each way the shares of the time in which the device had nothing to compute, and their median."""
    found: dict[str, list[float]] = {name: [] for name in feeders}
    for _ in range(num_traces):
        for name, make in feeders.items():
            share = traced(card, work, make)["idle_share"]
            if share is not None:
                found[name].append(share)
    return {name: {"median": statistics.median(shares), "traces": shares} for name, shares in found.items() if shares}


def worth_a_trace(comparison: Comparison, feeders: dict[str, Make]) -> dict[str, Make]:
    """Return the ways that were compared, but of torch's only the best."""
    best = comparison.best_of_groups().get("torch")
    return {
        name: make
        for name, make in feeders.items()
        if name in comparison.epochs and (name == best or not name.startswith("torch"))
    }
