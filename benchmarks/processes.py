"""The comparison of engine processes with torch's workers: the step beside them, and what needs the interpreter.

Usage: python -m benchmarks.processes step|npy|transform|large|first_batch|memory|all [--rounds N] [--seconds S]
       [--file-ms MS] [--max-concurrent N] [--batch-size N ...] [--data DIR] [--json FILE]
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aioload
from aioload.engine.server import start_server
from aioload.readers.local import read_file
from benchmarks.loaders import BATCH_SIZE, decode_npy
from benchmarks.paired import Comparison, Rival, compare, machine
from benchmarks.rivals import (
    Files,
    aioload_epoch,
    aioload_epoch_started,
    aioload_first_batch,
    bare_processes_epoch,
    torch_epoch,
    torch_epoch_started,
    torch_first_batch,
)
from benchmarks.samples import cache_folder, npy_files
from benchmarks.slow_folder import SlowFolderError, slow_npy_files
from benchmarks.slow_rivals import Batches, aioload_batches, spdl_batches, spdl_process_batches, torch_batches
from benchmarks.steps import Meter, Step, beside, forever, step_epoch

STEP_BATCH = 4
STEP_S, PAUSE_S = 2e-3, 1e-3
NUM_BESIDE = 16
NUM_LARGE, LARGE_BYTES, LARGE_BATCH = 200, 10_000_000, 4
NUM_SLOW = 2000
IMAGE_SHAPE = 3, 224, 224
NUM_PATHS = 1_000_000


class Transformed(torch.utils.data.Dataset[Any]):
    """Samples that take a millisecond of Python: their numbers, or images of a kind."""

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return NUM_SLOW

    def __getitem__(self, index: int) -> Any:
        ends = time.thread_time() + 1e-3
        while time.thread_time() < ends:
            pass
        return index if self.dtype is None else np.full(IMAGE_SHAPE, index % 256, self.dtype)


class Large(torch.utils.data.Dataset[Any]):
    """Samples of 10 MB, which take a copy to make."""

    def __init__(self) -> None:
        self.array = np.arange(LARGE_BYTES, dtype=np.uint8)

    def __len__(self) -> int:
        return NUM_LARGE

    def __getitem__(self, index: int) -> Any:
        return self.array.copy()


def compare_step(arguments: argparse.Namespace) -> list[Comparison]:
    """The step beside a loader at work: how many times as long as over one cached batch."""
    num_rounds, seconds = arguments.rounds, arguments.seconds
    settings = {"max_concurrent": arguments.max_concurrent}
    with slow_npy_files(arguments.data, 20_000, arguments.file_ms, **settings) as (_, paths):
        dataset, files = aioload.FileDataset(paths, decode_npy), Files(paths, decode_npy, read_file)
        ways = _ways_beside(dataset, files)
        meters = {name: Meter() for name in ways}
        step = Step()
        rivals = [
            Rival(name=name, epoch=step_epoch(way, step, meters[name], seconds=seconds), group=name)
            for name, way in ways.items()
        ]
        title = (
            f"step: over batches of {STEP_BATCH} files of 4 KB at {arguments.file_ms:g} ms each, "
            f"{arguments.max_concurrent} at once; speedup is how many times as long it takes"
        )
        comparison = compare(title, rivals, num_rounds=num_rounds, unit="ms")
    width = max(map(len, meters))
    print(f"  {'':{width}}    waits ms  hand-overs  preemptions, a step")
    for name, meter in meters.items():
        print(f"  {name:{width}}  {meter.row()}")
    return [comparison]


def _ways_beside(dataset: Any, files: Files) -> dict[str, Batches]:
    with closing(aioload.DataLoader(dataset, STEP_BATCH, num_workers=0)) as loader:
        cached = next(iter(loader))
    ways = {"one cached batch": forever(cached), "the same, after a pause of 1 ms": forever(cached, PAUSE_S)}
    work = load_for_ever, dataset, STEP_BATCH, NUM_BESIDE, STEP_S + PAUSE_S
    ways["the same, beside a loader of another process"] = beside(cached, PAUSE_S, *work)
    for num_reads in (16, 64):
        common = {"batch_size": STEP_BATCH, "num_workers": 2, "num_concurrent_reads": num_reads}
        ways[f"aioload, processes=1, {num_reads} reads"] = aioload_batches(dataset, processes=1, **common)
        ways[f"aioload, in the process, {num_reads} reads"] = aioload_batches(dataset, **common)
    ways["torch, 2 processes"] = torch_batches(files, batch_size=STEP_BATCH, num_workers=2)
    if importlib.util.find_spec("spdl") is None:
        print("left out: spdl, which is not installed")
    else:
        ways["SPDL, 16 threads"] = spdl_batches(files, batch_size=STEP_BATCH, num_threads=16, chunk=1)
        ways["SPDL, 16 threads, in a process"] = spdl_process_batches(files, batch_size=STEP_BATCH, num_threads=16)
    return ways


def load_for_ever(ready: Any, dataset: Any, batch_size: int, num_reads: int, step_s: float) -> None:
    """Load, in a process of its own, about as many batches a second as a training step takes."""
    torch.set_num_threads(1)
    while True:
        for _ in aioload.DataLoader(dataset, batch_size, num_workers=2, num_concurrent_reads=num_reads):
            ready.set()
            time.sleep(step_s)


def compare_npy(arguments: argparse.Namespace) -> list[Comparison]:
    """Small files in page cache."""
    return [_compare_npy(arguments, batch_size) for batch_size in arguments.batch_size]


def _compare_npy(arguments: argparse.Namespace, batch_size: int) -> Comparison:
    paths = npy_files(arguments.data)
    files = Files(paths, decode_npy, read_file)
    rivals = [
        *_ours(aioload.FileDataset(paths, decode_npy), batch_size=batch_size),
        Rival(name="torch, no workers", epoch=torch_epoch(files, batch_size=batch_size), group="torch"),
    ]
    rivals.append(_ceiling(files))
    for num_workers in (1, 2, 4):
        epoch = torch_epoch_started(files, batch_size=batch_size, num_workers=num_workers)
        rivals.append(Rival(name=f"torch, {num_workers} processes, started", epoch=epoch, group="torch"))
    title = f"npy: {len(paths):,} files of 4 KB in page cache, batches of {batch_size} (goal 2)"
    return compare(title, rivals, num_rounds=arguments.rounds)


def compare_transform(arguments: argparse.Namespace) -> list[Comparison]:
    """A transform of a millisecond that keeps the interpreter, and gives next to nothing, or images."""
    comparisons = []
    for dtype, what in ((None, "a number"), (np.uint8, "an image of bytes"), (np.float32, "an image of floats")):
        title = f"transform: {NUM_SLOW:,} samples of 1 ms of Python, {what} each, batches of {BATCH_SIZE} (goal 1.1)"
        comparisons.append(_against_two(title, Transformed(dtype), BATCH_SIZE, arguments.rounds))
    return comparisons


def compare_large(arguments: argparse.Namespace) -> list[Comparison]:
    """Samples of 10 MB."""
    title = f"large: {NUM_LARGE} samples of 10 MB, batches of {LARGE_BATCH} (goal 1.5)"
    return [_against_two(title, Large(), LARGE_BATCH, arguments.rounds)]


def _ours(dataset: Any, **arguments: Any) -> list[Rival]:
    """Return engine processes that are there before the clock runs, and such that are started by it."""
    started = aioload_epoch_started(dataset, processes=2, **arguments)
    cold = aioload_epoch(dataset, processes=2, **arguments)
    return [
        Rival(name="aioload, processes=2, started", epoch=started, group="aioload"),
        Rival(name="aioload, processes=2", epoch=cold, group="aioload"),
    ]


def _ceiling(dataset: torch.utils.data.Dataset[Any]) -> Rival:
    return Rival(name="2 bare processes", epoch=bare_processes_epoch(dataset, num_processes=2), group="the ceiling")


def _against_two(title: str, dataset: Any, batch_size: int, num_rounds: int) -> Comparison:
    ours = {"batch_size": batch_size, "num_workers": 2}
    rivals = [
        *_ours(dataset, **ours),
        Rival(name="aioload, in the process", epoch=aioload_epoch(dataset, **ours), group="in the process"),
        Rival(name="torch, 2 processes", epoch=torch_epoch(dataset, **ours), group="torch"),
        Rival(name="torch, 2 processes, started", epoch=torch_epoch_started(dataset, **ours), group="torch"),
        _ceiling(dataset),
    ]
    return compare(title, rivals, num_rounds=num_rounds)


def compare_first_batch(arguments: argparse.Namespace) -> list[Comparison]:
    """From ``iter(loader)`` to the first batch, with the server that forks processes started before."""
    paths = npy_files(arguments.data)
    ours = {"batch_size": BATCH_SIZE, "num_workers": 2}
    dataset = aioload.FileDataset(paths, decode_npy)
    files = Files(paths, decode_npy, read_file)
    comparisons = []
    for method in (None, "forkserver", "fork"):  # torch forks where nothing is said, and we have a server do it
        common = {**ours, "multiprocessing_context": method}
        first = aioload_first_batch(dataset, processes=2, **common)
        rivals = [
            Rival(name="aioload, processes=2", epoch=first, group="aioload"),
            Rival(name="torch, 2 processes", epoch=torch_first_batch(files, **common), group="torch"),
        ]
        title = f"first_batch: of {len(paths):,} npy files, processes by {method or 'default'} (goal 1)"
        comparisons.append(compare(title, rivals, num_rounds=arguments.rounds, unit="ms"))
    return comparisons


def compare_memory(arguments: argparse.Namespace) -> list[Comparison]:
    """What all processes hold together; printed, and no comparison of speeds."""
    rows = {
        "aioload, processes=1": ("aioload", 1, "list"),
        "torch, 8 processes": ("torch", 8, "list"),
        "aioload, processes=1, in a FileDataset": ("aioload", 1, "files"),
        "aioload, processes=8, in a FileDataset": ("aioload", 8, "files"),
    }
    figures: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(arguments.rounds):
        for name, (loader, num_processes, kind) in rows.items():
            command = [sys.executable, "-m", "benchmarks.tree_memory", loader, str(num_processes), str(NUM_PATHS), kind]
            figures[name].append(int(subprocess.run(command, check=True, capture_output=True).stdout) / 1e6)
    ours, theirs = (statistics.median(figures[name]) for name in list(rows)[:2])
    print(f"memory: the processes of a dataset of {NUM_PATHS:,} paths, in MB")
    for name, each in figures.items():
        print(f"  {name:40} {statistics.median(each):8,.0f}  ({min(each):,.0f} - {max(each):,.0f})")
    print(f"  ours is {ours / theirs:.2f} of torch's (goal 0.33)\n", flush=True)
    return []


COMPARISONS: dict[str, Callable[[argparse.Namespace], list[Comparison]]] = {
    "step": compare_step,
    "npy": compare_npy,
    "transform": compare_transform,
    "large": compare_large,
    "first_batch": compare_first_batch,
    "memory": compare_memory,
}


def main() -> None:
    """Run the comparisons that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("comparison", choices=[*COMPARISONS, "all"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one of warming up")
    parser.add_argument("--seconds", type=float, default=2.0, help="step: how long a row's turn is")
    parser.add_argument("--file-ms", type=float, default=7.0, help="step: how long a file takes to open and read")
    parser.add_argument("--max-concurrent", type=int, default=16, help="step: files that the storage serves at once")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[BATCH_SIZE, 256], help="npy: one table for each")
    parser.add_argument("--data", type=Path, default=cache_folder(), help="where the files are kept")
    parser.add_argument("--json", type=Path, help="write the figures of every round to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    torch.set_num_threads(1)
    start_server(None)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    names = list(COMPARISONS) if arguments.comparison == "all" else [arguments.comparison]
    done: list[Comparison] = []
    try:
        for name in names:
            for comparison in COMPARISONS[name](arguments):
                print(comparison.table() + "\n", flush=True)
                done.append(comparison)
    except SlowFolderError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    if arguments.json:
        report = {"machine": machine(), "comparisons": [comparison.as_json() for comparison in done]}
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
