"""The comparison of samplers: the wait for the first index, resuming, indices per second, memory, padding.

Usage: python -m benchmarks.samplers first|resume|shuffle|weighted|memory|padding|all [--rounds N] [--json FILE]
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from aioload.samplers import BucketBatchSampler, ShuffleSampler, StratifiedBatchSampler, WeightedSampler
from benchmarks.paired import Comparison, Rival, compare, machine


def clocked(work: Callable[[], int]) -> Callable[[], tuple[int, float]]:
    """Return an epoch: what ``work`` counts, and the seconds it takes."""

    def epoch() -> tuple[int, float]:
        start = time.perf_counter()
        count = work()
        return count, time.perf_counter() - start

    return epoch


def rival(name: str, work: Callable[[], int]) -> Rival:
    """Return a rival that is a group of its own."""
    return Rival(name=name, epoch=clocked(work), group=name)


def first(items: Iterable[Any]) -> int:
    """Take one item."""
    next(iter(items))
    return 1


def all_of(items: Iterable[Any]) -> int:
    """Take all items into a list, as a loader's worker would one by one."""
    return len(list(items))


def compare_first(num_rounds: int, size: int = 10**8) -> list[Comparison]:
    """From nothing to the first index of a shuffled epoch."""
    rivals = [
        rival("ShuffleSampler", lambda: first(ShuffleSampler(size))),
        rival("torch.randperm", lambda: first([torch.randperm(size)[0].item()])),
    ]
    return [compare(f"first: of {size:,} shuffled", rivals, num_rounds=num_rounds, unit="ms")]


def compare_resume(num_rounds: int, size: int = 10**9, position: int = 256_000_000) -> list[Comparison]:
    """From a saved state to the next index; the rival skips, but a hundredth of the way only."""
    state = {**ShuffleSampler(size).state_dict(), "epoch": 3, "position": position}

    def resume() -> int:
        sampler = ShuffleSampler(size)
        sampler.load_state_dict(state)
        return first(sampler)

    rivals = [
        rival("ShuffleSampler", resume),
        rival("skipping a hundredth", lambda: first(islice(ShuffleSampler(size), position // 100, None))),
    ]
    return [compare(f"resume: at {position:,} of {size:,}", rivals, num_rounds=num_rounds, unit="ms")]


def compare_shuffle(num_rounds: int) -> list[Comparison]:
    """Whole shuffled epochs, into a list."""
    comparisons = []
    for size in (1000, 10**6):
        ours, theirs = ShuffleSampler(size), RandomSampler(range(size))
        rivals = [
            rival("ShuffleSampler", lambda ours=ours: all_of(ours)),  # type: ignore[misc]
            rival("torch RandomSampler", lambda theirs=theirs: all_of(theirs)),  # type: ignore[misc]
        ]
        comparisons.append(compare(f"shuffle: {size:,} indices", rivals, num_rounds=num_rounds))
    return comparisons


def compare_weighted(num_rounds: int, num_draws: int = 10**6) -> list[Comparison]:
    """A million draws; torch draws from at most 2**24 weights."""
    comparisons = []
    for size in (10**4, 10**6, 10**7, 10**8):
        weights = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        ours = WeightedSampler(weights, num_draws)
        rivals = [rival("WeightedSampler", lambda ours=ours: all_of(ours))]  # type: ignore[misc]
        if size < 2**24:
            theirs = WeightedRandomSampler(weights, num_draws)  # type: ignore[arg-type]
            rivals.append(rival("torch", lambda theirs=theirs: all_of(theirs)))  # type: ignore[misc]
        title = f"weighted: {num_draws:,} draws from {size:,} weights"
        comparisons.append(compare(title, rivals, num_rounds=num_rounds))
    return comparisons


def memory_lines() -> list[str]:
    """The most memory that NumPy and Python had at a time, for a million indices of an epoch."""
    lines = ["memory: peak while a million indices are taken, one by one"]
    for size in (10**6, 10**9, 10**12):
        tracemalloc.start()
        for _ in islice(ShuffleSampler(size), 10**6):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        lines.append(f"  ShuffleSampler({size:>17,})  {peak / 1e6:8.2f} MB  (an int64 order: {size * 8 / 1e6:,.0f} MB)")
    return lines


def padding_lines(num_samples: int = 10**6, batch_size: int = 64) -> list[str]:
    """How much is padding, and what planning an epoch takes."""
    lengths = np.random.RandomState(0).lognormal(4, 0.6, num_samples).astype(np.int64) + 1
    lines = [f"padding: {num_samples:,} lognormal lengths, batches of {batch_size}"]
    for number in (1, 10, 100, 1000):
        sampler = BucketBatchSampler(lengths, batch_size, num_batches_per_bucket=number)
        seconds = clocked(lambda sampler=sampler: first(sampler))()[1]  # type: ignore[misc]
        lines.append(
            f"  {number:5} batches a bucket  {sampler.padding_waste():7.2%}  first batch {1000 * seconds:.0f} ms"
        )
    stratified = StratifiedBatchSampler(lengths % 1000, batch_size)
    seconds = clocked(lambda: first(stratified))()[1]
    return [*lines, f"  StratifiedBatchSampler of 1,000 classes: first batch {1000 * seconds:.0f} ms"]


COMPARISONS: dict[str, Callable[[int], list[Comparison]]] = {
    "first": compare_first,
    "resume": compare_resume,
    "shuffle": compare_shuffle,
    "weighted": compare_weighted,
}
LINES: dict[str, Callable[[], list[str]]] = {"memory": memory_lines, "padding": padding_lines}


def main() -> None:
    """Run the comparisons that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.samplers", description=__doc__)
    parser.add_argument("comparison", choices=[*COMPARISONS, *LINES, "all"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one of warming up")
    parser.add_argument("--json", type=Path, help="write the figures of every round to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    names = [*COMPARISONS, *LINES] if arguments.comparison == "all" else [arguments.comparison]
    done: list[Comparison] = []
    for name in names:
        if name in LINES:
            print("\n".join(LINES[name]()) + "\n", flush=True)
            continue
        for comparison in COMPARISONS[name](arguments.rounds):
            print(comparison.table() + "\n", flush=True)
            done.append(comparison)
    if arguments.json is not None:
        figures = {"machine": machine(), "comparisons": [comparison.as_json() for comparison in done]}
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
