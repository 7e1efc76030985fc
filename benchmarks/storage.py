"""The comparison of loaders on slow storage: small files at 7 ms each, a tail of slow reads, reads that fail.

Usage: python -m benchmarks.storage speed|tail|faults|all [--rounds N] [--files N] [--seconds S] [--step-ms MS]
       [--every] [--data DIR] [--json FILE]
"""

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import aioload
from aioload.readers.local import read_file
from benchmarks.loaders import BATCH_SIZE, decode_npy
from benchmarks.paired import Comparison, Rival, compare, machine
from benchmarks.rivals import Files
from benchmarks.samples import cache_folder, npy_files
from benchmarks.slow_folder import SlowFolder, SlowFolderError
from benchmarks.slow_rivals import (
    Batches,
    aioload_batches,
    clocked,
    grain_batches,
    nodes_batches,
    spdl_batches,
    torch_batches,
    torch_pool_batches,
    window_batches,
)

# An open is a round trip that also checks the name, and a read is another, as with NFS 4. The kernel keeps names and
# sizes, as NFS clients do, which here leaves more of the processor to the loaders.
DELAYS = {"open_ms": 3.0, "read_ms": 4.0, "cache_s": 3600.0}
TAIL = {"slow_opens": 0.01, "slow_factor": 100.0}
FAULTS = {"fail_opens": 0.02}
FIXED = (8, 16, 32, 64, 128, 256)
NUM_READS = 64
NUM_KEPT = 2
NUM_FILES = {"speed": 20_000, "tail": 6_400, "faults": 20_000}


def compare_speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every loader at its best setting: what comes of reading 4 KB files that take 7 ms each."""
    with _slow_files(arguments, "speed") as (_, paths):
        ours, rivals = _ours(paths), _rivals(paths)
        epochs = {
            name: clocked(batches, most_s=arguments.seconds, step_s=arguments.step_ms / 1000)
            for group in (ours | rivals).values()
            for name, batches in group.items()
        }
        tried = {name: _tried(name, epoch) for name, epoch in epochs.items()}
        kept = ours | {group: _best(names, tried, arguments) for group, names in rivals.items()}
        first = "auto" if "auto" in tried else max(ours["aioload, fixed"], key=tried.__getitem__)
        named = [Rival(name=name, epoch=epochs[name], group=group) for group, names in kept.items() for name in names]
        named.sort(key=lambda rival: rival.name != first)
        title = f"speed: {len(paths):,} files of 4 KB at 7 ms each, batches of {BATCH_SIZE}"
        if arguments.step_ms:
            title += f", a step of {arguments.step_ms:g} ms"
        comparison = compare(title, named, num_rounds=arguments.rounds, num_warming=0)
    print(f"{comparison.table()}\n{_goals(comparison, set(ours))}\n", flush=True)
    return [comparison.as_json() | {"tried": tried}]


def _ours(paths: list[str]) -> dict[str, dict[str, Batches]]:
    """Return the ways of aioload by group."""
    dataset = aioload.FileDataset(paths, decode_npy)
    fixed = {
        f"{number} reads": aioload_batches(dataset, batch_size=BATCH_SIZE, num_concurrent_reads=number)
        for number in FIXED
    }
    if not _auto_works():
        return {"aioload, fixed": fixed}
    auto = aioload_batches(dataset, batch_size=BATCH_SIZE, num_concurrent_reads="auto")
    return {"aioload, auto": {"auto": auto}, "aioload, fixed": fixed}


def _auto_works() -> bool:
    try:
        aioload.DataLoader(aioload.FileDataset(["/"], decode_npy), num_concurrent_reads="auto").close()  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        print(f"left out: num_concurrent_reads='auto', which this aioload refuses: {error}")
        return False
    return True


def _rivals(paths: list[str]) -> dict[str, dict[str, Batches]]:
    """Return the settings to try of each rival that is installed, by group."""
    files, size = Files(paths, decode_npy, read_file), {"batch_size": BATCH_SIZE}
    groups = {
        "the window of futures": {
            f"window, {n} threads": window_batches(files, **size, num_threads=n) for n in (32, 64, 128)
        },
        "torch's worker processes": {
            f"torch, {n} processes": torch_batches(files, **size, num_workers=n) for n in (2, 4, 8, 16, 32)
        },
        "torch with a thread pool": {
            f"torch, {n} processes of {threads} threads": torch_pool_batches(
                files, **size, num_workers=n, num_threads=threads
            )
            for n, threads in ((0, 64), (1, 64), (2, 32), (2, 64), (4, 32), (4, 64), (8, 16), (8, 64))
        },
    }
    for package, settings in (("torchdata", _nodes), ("spdl", _spdl), ("grain", _grain)):
        if importlib.util.find_spec(package) is None:
            print(f"left out: {package}, which is not installed")
        else:
            groups |= settings(files)
    return groups


def _nodes(files: Files) -> dict[str, dict[str, Batches]]:
    def nodes(name: str, n: int, **work: Any) -> tuple[str, Batches]:
        return f"nodes, {n} {name}", nodes_batches(files, batch_size=BATCH_SIZE, num_workers=n, **work)

    threads = [nodes("threads, a sample each", n, whole=False) for n in (32, 64, 128)]
    threads += [nodes("threads, 16 samples each", n, whole=False, prebatch=16) for n in (32, 64, 128)]
    threads += [nodes("threads, a batch each", n, whole=True) for n in (32, 64, 128)]
    processes = [nodes("processes, a batch each", n, whole=True, method="process") for n in (8, 16, 32)]
    return {"torchdata.nodes with threads": dict(threads), "torchdata.nodes with processes": dict(processes)}


def _spdl(files: Files) -> dict[str, dict[str, Batches]]:
    settings = {
        f"SPDL, {n} threads, {chunk} sample{'s' if chunk > 1 else ''} each": spdl_batches(
            files, batch_size=BATCH_SIZE, num_threads=n, chunk=chunk
        )
        for chunk in (1, 8, BATCH_SIZE)
        for n in (32, 64, 128)
    }
    return {"SPDL": settings}


def _grain(files: Files) -> dict[str, dict[str, Batches]]:
    def grain(name: str, **work: Any) -> tuple[str, Batches]:
        return f"grain, {name}", grain_batches(files, batch_size=BATCH_SIZE, **work)

    settings = [grain(f"{n} threads, a sample each", num_threads=n, whole=False) for n in (16, 32, 64, 128)]
    settings += [grain(f"{n} threads, a batch each", num_threads=n, whole=True) for n in (16, 32, 64, 128)]
    settings += [
        grain(f"{n} processes of {threads} threads", num_threads=threads, whole=False, num_workers=n)
        for n, threads in ((2, 32), (2, 64), (4, 32))
    ]
    return {"grain": dict(settings)}


def _tried(name: str, epoch: Callable[[], tuple[int, float]]) -> float:
    """Return the samples a second of one epoch: enough to leave the worse settings out of the rounds."""
    num_samples, seconds = epoch()
    print(f"  tried {name}: {num_samples / seconds:,.0f} samples/s", flush=True)
    return num_samples / seconds


def _best(names: dict[str, Batches], tried: dict[str, float], arguments: argparse.Namespace) -> list[str]:
    """Return the settings that go into the rounds: more than one, since a single epoch may be off."""
    return sorted(names, key=tried.__getitem__, reverse=True)[: None if arguments.every else NUM_KEPT]


def _goals(comparison: Comparison, ours: set[str]) -> str:
    """Say how our first row does beside the best of each kind."""
    best = comparison.best_of_groups()
    rivals = {name: comparison.figure(name) for group, name in best.items() if group not in ours}
    lines = []
    if comparison.ours == "auto":
        lines.append(("of the best fixed setting (goal 0.90)", best["aioload, fixed"]))
    if rivals:
        lines.append(("times the best rival (goal 2)", max(rivals, key=rivals.__getitem__)))
    return "\n".join(
        f"  {comparison.ours}: {_spread(comparison.speedups(name))} {what}, {name}" for what, name in lines
    )


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
            with _slow_files(arguments, "tail", seed=number, **TAIL) as (folder, paths):
                _pass(passes[name], folder, paths, arguments.step_ms / 1000, read=policy)
    num_files = passes["not hedged"].num_samples
    print(f"tail: {num_files:,} files of 4 KB at 7 ms each, 1 in 100 at 700 ms, {NUM_READS} reads at once")
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
            f"  hedging: {_spread(_ratios(off.p99s(), on.p99s()))} times shorter waits (goal 3), "
            f"{_spread(_ratios(on.speeds(), off.speeds()))} times the speed (goal 1.5), "
            f"{_spread(_ratios(on.num_opens, off.num_opens))} times the reads (goal 1.06 at most)\n"
        )
    return [{"title": "tail", "passes": {name: asdict(way) for name, way in passes.items()}}]


def compare_faults(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Two reads in a hundred fail once: what the epoch costs, and whether it is the same."""
    ways = {"faults": FAULTS, "none": {}}
    passes = {name: _Passes() for name in ways}
    for number in range(arguments.rounds):
        for name, settings in ways.items():
            with _slow_files(arguments, "faults", seed=number, **settings) as (folder, paths):
                _pass(passes[name], folder, paths, arguments.step_ms / 1000)
    faults, none = passes["faults"], passes["none"]
    same = "bit-identical" if len({*faults.digests, *none.digests}) == 1 else "NOT IDENTICAL"
    print(f"faults: {none.num_samples:,} files of 4 KB at 7 ms each, 2 in 100 fail once, {NUM_READS} reads at once")
    print(
        f"  {len(faults.digests)} epochs with faults, {len(none.digests)} without: {same}; "
        f"{sum(faults.num_failed):,} reads failed, {sum(faults.retries):,} were tried again\n"
        f"  {statistics.median(faults.speeds()):,.0f} samples/s with faults, "
        f"{_spread(_ratios(faults.speeds(), none.speeds()))} of the speed without\n"
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


@contextmanager
def _slow_files(arguments: argparse.Namespace, mode: str, **settings: float) -> Iterator[tuple[SlowFolder, list[str]]]:
    """Lend the mounted folder, and the paths of its files, whose names the kernel knows already."""
    local = npy_files(arguments.data)[: arguments.files or NUM_FILES[mode]]
    with SlowFolder(Path(local[0]).parent, arguments.data, **DELAYS, **settings) as folder:
        paths = [str(folder.path / Path(path).name) for path in local]
        for path in paths:
            os.stat(path)
        yield folder, paths


def _ratios(above: list[Any], below: list[Any]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


COMPARISONS = {"speed": compare_speed, "tail": compare_tail, "faults": compare_faults}


def main() -> None:
    """Run the comparisons that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.add_argument("comparison", choices=[*COMPARISONS, "all"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--files", type=int, help=f"how many files, by default {NUM_FILES}")
    parser.add_argument("--seconds", type=float, default=3.0, help="speed: an epoch is broken off after so long")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a training step sleeps")
    parser.add_argument("--every", action="store_true", help=f"speed: all settings, not the best {NUM_KEPT}, in rounds")
    parser.add_argument("--data", type=Path, default=cache_folder(), help="where files, and the program, are kept")
    parser.add_argument("--json", type=Path, help="write the figures of every round to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.files is not None and not 1 <= arguments.files <= NUM_FILES["speed"]):
        parser.error(f"--rounds must be at least 1, --files from 1 to {NUM_FILES['speed']}")
    # More processes than cores: torch advises against it, and here that is one of the settings to try.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    names = list(COMPARISONS) if arguments.comparison == "all" else [arguments.comparison]
    done: list[dict[str, Any]] = []
    try:
        for name in names:
            done += COMPARISONS[name](arguments)
    except SlowFolderError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "comparisons": done}, indent=2))


if __name__ == "__main__":
    main()
