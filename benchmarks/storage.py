"""The comparison of loaders on slow storage: small files at 7 ms each, a tail of slow reads, reads that fail.

Usage: python -m benchmarks.storage speed|tail|faults|all [--rounds N] [--files N] [--file-ms MS] [--seconds S]
       [--step-ms MS] [--every] [--only WORD ...] [--data DIR] [--json FILE]
"""

import argparse
import gc
import importlib.util
import json
import resource
import statistics
import warnings
from pathlib import Path
from typing import Any

import aioload
from aioload.readers.local import read_file
from benchmarks.loaders import BATCH_SIZE, decode_npy
from benchmarks.mishaps import compare_faults, compare_tail
from benchmarks.paired import Comparison, Rival, compare, machine, spread
from benchmarks.rivals import Epoch, Files
from benchmarks.samples import cache_folder
from benchmarks.slow_folder import SlowFolderError, slow_npy_files
from benchmarks.slow_rivals import (
    Batches,
    aioload_again_batches,
    aioload_batches,
    clocked,
    grain_batches,
    nodes_batches,
    spdl_batches,
    torch_batches,
    torch_pool_batches,
    window_batches,
)

AUTO = "aioload, auto"
AGAIN = "aioload, auto, next epoch"
FIXED_GROUP = "aioload, fixed"
FIXED = (8, 16, 32, 64, 128, 256)
NUM_KEPT = 2
NUM_FILES = 20_000


def compare_speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every loader at its best setting: what comes of reading 4 KB files that take 7 ms each."""
    with slow_npy_files(arguments.data, arguments.files or NUM_FILES, arguments.file_ms) as (_, paths):
        ours, rivals = _ours(paths, arguments.seconds), _only(_rivals(paths), arguments.only)
        settings = {name: batches for group in (ours | rivals).values() for name, batches in group.items()}
        cpu_us: dict[str, list[float]] = {name: [] for name in settings}
        epochs = {
            name: _metered(clocked(batches, most_s=arguments.seconds, step_s=arguments.step_ms / 1000), cpu_us[name])
            for name, batches in settings.items()
        }
        tried = {name: _tried(name, epoch) for name, epoch in epochs.items()}
        kept = ours | {group: _best(names, tried, arguments) for group, names in rivals.items()}
        first = AUTO if AUTO in tried else max(ours[FIXED_GROUP], key=tried.__getitem__)
        named = [Rival(name=name, epoch=epochs[name], group=group) for group, names in kept.items() for name in names]
        named.sort(key=lambda rival: rival.name != first)
        title = f"speed: {len(paths):,} files of 4 KB at {arguments.file_ms:g} ms each, batches of {BATCH_SIZE}"
        if arguments.step_ms:
            title += f", a step of {arguments.step_ms:g} ms"
        comparison = compare(title, named, num_rounds=arguments.rounds, num_warming=0)
    print(f"{comparison.table()}\n{_goals(comparison, set(ours))}\n{_cpu_table(comparison, cpu_us)}\n", flush=True)
    return [comparison.as_json() | {"tried": tried, "cpu_us": cpu_us}]


def _metered(epoch: Epoch, cpu_us: list[float]) -> Epoch:
    """Note the processor time for each sample, that of processes that have ended included."""

    def metered() -> tuple[int, float]:
        before = _cpu_s()
        num_samples, seconds = epoch()
        gc.collect()
        cpu_us.append(1e6 * (_cpu_s() - before) / num_samples)
        return num_samples, seconds

    return metered


def _cpu_s() -> float:
    spent = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(times.ru_utime + times.ru_stime for times in spent)


def _cpu_table(comparison: Comparison, cpu_us: dict[str, list[float]]) -> str:
    """Return what the rows took of the processor, which a busy machine changes less than their speed."""
    # The epoch before an AGAIN is not clocked, but its processor time is counted.
    names = [name for name, group in comparison.groups.items() if group != AGAIN]
    names.sort(key=lambda name: statistics.median(cpu_us[name]))
    lines = [f"    {statistics.median(cpu_us[name]):6,.0f}  {name}" for name in names]
    return "\n".join(
        ["  processor time for a sample in us, the start of processes included, the file system's not", *lines]
    )


def _ours(paths: list[str], most_s: float) -> dict[str, dict[str, Batches]]:
    """Return the ways of aioload by group."""
    dataset = aioload.FileDataset(paths, decode_npy)
    fixed = {
        f"aioload, {number} reads": aioload_batches(dataset, batch_size=BATCH_SIZE, num_concurrent_reads=number)
        for number in FIXED
    }
    if not _auto_works():
        return {FIXED_GROUP: fixed}
    arguments = {"batch_size": BATCH_SIZE, "num_concurrent_reads": "auto"}
    again = aioload_again_batches(dataset, most_s=most_s, **arguments)
    return {
        AUTO: {AUTO: aioload_batches(dataset, **arguments)},
        AGAIN: {AGAIN: again},
        FIXED_GROUP: fixed,
    }


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


def _only(groups: dict[str, dict[str, Batches]], words: list[str] | None) -> dict[str, dict[str, Batches]]:
    """Leave out rows whose names have none of the words, and groups without rows."""
    if not words:
        return groups
    left = {
        group: {name: batches for name, batches in rows.items() if any(word in name for word in words)}
        for group, rows in groups.items()
    }
    return {group: rows for group, rows in left.items() if rows}


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


def _tried(name: str, epoch: Epoch) -> float:
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
    if comparison.ours == AUTO:
        lines.append(("of the best fixed setting (goal 0.90)", best[FIXED_GROUP]))
    if rivals:
        lines.append(("times the best rival (goal 2)", max(rivals, key=rivals.__getitem__)))
    return "\n".join(f"  {comparison.ours}: {spread(comparison.speedups(name))} {what}, {name}" for what, name in lines)


COMPARISONS = {"speed": compare_speed, "tail": compare_tail, "faults": compare_faults}


def main() -> None:
    """Run the comparisons that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.add_argument("comparison", choices=[*COMPARISONS, "all"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--files", type=int, help="how many files; by default as many as there are, fewer for tail")
    parser.add_argument("--file-ms", type=float, default=7.0, help="how long a file takes to open and read")
    parser.add_argument("--seconds", type=float, default=4.0, help="speed: an epoch is broken off after so long")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a training step sleeps")
    parser.add_argument("--every", action="store_true", help=f"speed: all settings, not the best {NUM_KEPT}, in rounds")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="speed: rivals whose names have one of these in them")
    parser.add_argument("--data", type=Path, default=cache_folder(), help="where files, and the program, are kept")
    parser.add_argument("--json", type=Path, help="write the figures of every round to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.files is not None and not 1 <= arguments.files <= NUM_FILES):
        parser.error(f"--rounds must be at least 1, --files from 1 to {NUM_FILES}")
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
