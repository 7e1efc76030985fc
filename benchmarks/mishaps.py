"""Mishaps of a storage: a tail of slow reads, and reads that fail; what they cost a loader, round by round."""

import argparse
import hashlib
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import aioload
from benchmarks.loaders import BATCH_SIZE, decode_npy
from benchmarks.paired import spread
from benchmarks.slow_folder import SlowFolder, slow_npy_files

TAIL = {"slow_opens": 0.01, "slow_factor": 100.0}
FAULTS = {"fail_opens": 0.02}
NUM_READS = 64
NUM_TAIL_FILES = 6_400
NUM_FAULTS_FILES = 20_000


@dataclass
class _Passes:
    """The epochs of one way, in the order of the rounds."""

    num_samples: int = 0
    seconds: list[float] = field(default_factory=list)
    waits_s: list[list[float]] = field(default_factory=list)
    num_opens: list[int] = field(default_factory=list)
    num_failed: list[int] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def speeds(self) -> list[float]:
        return [self.num_samples / seconds for seconds in self.seconds]

    def p99s(self) -> list[float]:
        return [float(np.quantile(waits, 0.99)) for waits in self.waits_s]

    def all_waits(self) -> list[float]:
        return [wait for waits in self.waits_s for wait in waits]


def compare_tail(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One open in a hundred, and the read after it, a hundred times slower: hedged, and not."""
    try:
        hedged = aioload.ReadPolicy(hedge=True)  # type: ignore[call-arg]
        plain = aioload.ReadPolicy(hedge=False)  # type: ignore[call-arg]
    except TypeError:
        print("left out: hedging, which this aioload does not know")
        hedged, plain = None, aioload.ReadPolicy()
    policies = {"hedged": hedged, "not hedged": plain} if hedged else {"not hedged": plain}
    passes = {name: _Passes() for name in policies}
    for number in range(arguments.rounds):
        for name, policy in policies.items():
            with _files(arguments, NUM_TAIL_FILES, seed=number, **TAIL) as (folder, paths):
                _pass(passes[name], folder, paths, arguments.step_ms / 1000, read=policy)
    num_files = passes["not hedged"].num_samples
    print(f"tail: {_what(num_files, arguments)}, 1 in 100 a hundred times slower")
    for name, way in passes.items():
        wait, pooled = statistics.median(way.p99s()), np.quantile(way.all_waits(), 0.99)
        print(
            f"  {name:12} {statistics.median(way.speeds()):8,.0f} samples/s; wait for a batch, 99 of 100: "
            f"{1000 * wait:,.0f} ms (all rounds {1000 * pooled:,.0f} ms); "
            f"reads for each sample: {statistics.median(way.num_opens) / num_files:.3f}"
        )
    if hedged:
        on, off = passes["hedged"], passes["not hedged"]
        print(
            f"  hedging: {spread(_ratios(off.p99s(), on.p99s()))} times shorter waits (goal 3), "
            f"{spread(_ratios(on.speeds(), off.speeds()))} times the speed (goal 1.5), "
            f"{spread(_ratios(on.num_opens, off.num_opens))} times the reads (goal 1.06 at most)\n"
        )
    return [{"title": "tail", "passes": {name: asdict(way) for name, way in passes.items()}}]


def compare_faults(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Two reads in a hundred fail once: what the epoch costs, and whether it is the same."""
    ways = {"faults": FAULTS, "none": {}}
    passes = {name: _Passes() for name in ways}
    for number in range(arguments.rounds):
        for name, settings in ways.items():
            with _files(arguments, NUM_FAULTS_FILES, seed=number, **settings) as (folder, paths):
                _pass(passes[name], folder, paths, arguments.step_ms / 1000)
    faults, none = passes["faults"], passes["none"]
    same = "bit-identical" if len({*faults.digests, *none.digests}) == 1 else "NOT IDENTICAL"
    print(f"faults: {_what(none.num_samples, arguments)}, 2 in 100 fail once")
    print(
        f"  {len(faults.digests)} epochs with faults, {len(none.digests)} without: {same}; "
        f"{sum(faults.num_failed):,} reads failed, {sum(faults.retries):,} were tried again\n"
        f"  {statistics.median(faults.speeds()):,.0f} samples/s with faults, "
        f"{spread(_ratios(faults.speeds(), none.speeds()))} of the speed without\n"
    )
    return [{"title": "faults", "passes": {name: asdict(way) for name, way in passes.items()}}]


def _pass(way: _Passes, folder: SlowFolder, paths: list[str], step_s: float, **policy: Any) -> None:
    """Load one epoch, and note how long each batch was waited for."""
    digest, waits, num_samples = hashlib.sha256(), [], 0
    dataset = aioload.FileDataset(paths, decode_npy)
    with closing(aioload.DataLoader(dataset, BATCH_SIZE, num_concurrent_reads=NUM_READS, **policy)) as loader:
        start = asked = time.perf_counter()
        for batch in loader:
            waits.append(time.perf_counter() - asked)
            num_samples += len(batch)
            digest.update(batch.numpy())
            time.sleep(step_s)
            asked = time.perf_counter()
        way.seconds.append(time.perf_counter() - start)
        way.retries.append(loader.stats().retries)
    counts = folder.counts()
    way.num_samples = num_samples
    way.waits_s.append(waits)
    way.num_opens.append(counts["open"])
    way.num_failed.append(counts["failed"])
    way.digests.append(digest.hexdigest())


def _ratios(above: list[Any], below: list[Any]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def _files(arguments: argparse.Namespace, num_files: int, **settings: float) -> Any:
    return slow_npy_files(arguments.data, arguments.files or num_files, arguments.file_ms, **settings)


def _what(num_files: int, arguments: argparse.Namespace) -> str:
    return f"{num_files:,} files of 4 KB at {arguments.file_ms:g} ms each, {NUM_READS} reads at once"
