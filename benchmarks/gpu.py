"""The comparison on a GPU: copies, steps, idle time, a trace, the first batch, and memory of the device.

Usage: python -m benchmarks.gpu [--only copies trace ring steps first] [--rounds N] [--json FILE] [--trace FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cards import Card, CudaCard, Rehearsal, facts_of_the_run, without_warnings_of_forks
from benchmarks.gpu_copies import compare_copies, shares_of_bare_copy, spdl_transfer, those_that_run
from benchmarks.gpu_rings import compare_rings
from benchmarks.gpu_training import (
    WORKLOADS,
    compare_steps,
    idle_shares,
    overhead_lines,
    overheads,
    traced,
    workloads,
    worth_a_trace,
    write_jpegs,
)
from benchmarks.paired import Comparison, Rival, compare, spread

Figures = dict[str, Any]
"""What a section found, as JSON knows it."""


class Session:
    """What the sections have in common."""

    def __init__(self, card: Card, num_rounds: int, trace: Path, folder: Path, minutes: float = 8.0) -> None:
        self.deadline = time.perf_counter() + 60 * minutes
        self.card, self.num_rounds, self.trace, self.folder = card, num_rounds, trace, folder
        cores = len(os.sched_getaffinity(0))
        self.num_workers = sorted({min(8, cores), cores}) if card.is_real else [0]

    def show(self, comparison: Comparison, *more: str) -> Figures:
        """Print a comparison, and return it."""
        print("\n".join([comparison.table(), *more, ""]), flush=True)
        return comparison.as_json()

    def section_folder(self, name: str) -> Path:
        """Return a new folder for files."""
        folder = self.folder / name
        folder.mkdir()
        return folder


def copies(session: Session) -> Figures:
    """Megabytes a second, for batches of 150 and 10 MB."""
    is_real = session.card.is_real
    sizes, seconds = ([150e6, 10e6], 0.25) if is_real else ([100e3], 0.0)
    if spdl_transfer() is None:
        print("SPDL is not installed and was not compared.")
    found = compare_copies(session.card, session.num_rounds, [int(size) for size in sizes], seconds)
    shown = []
    for each in found:
        shares = shares_of_bare_copy(each)
        lines = [f"  of the bare copy's rate: {name} {spread(values)}" for name, values in shares.items()]
        shown.append({**session.show(each, *lines), "shares_of_bare_copy": shares})
    return {"comparisons": shown}


def ring(session: Session) -> Figures:
    """Memory for each batch from the allocator, against two buffers used in turn."""
    sizes, num_batches = ([10e6, 1e6], 200) if session.card.is_real else ([1e5], 4)
    found = compare_rings(session.card, session.num_rounds, [int(size) for size in sizes], num_batches)
    return {"comparisons": [session.show(each) for each in found]}


def steps(session: Session) -> Figures:
    """The time of a step, against one fed with a batch that is there already, and the device's idle time."""
    comparisons, idle = [], {}
    for work in workloads(session.card, WORKLOADS, session.section_folder("steps")):
        feeders = work.feeders(session.card, session.num_workers)
        comparison = compare_steps(session.card, work, session.num_rounds, feeders)
        shares = idle_shares(session.card, work, worth_a_trace(comparison, feeders), min(3, session.num_rounds))
        idle[work.name] = shares
        lines = [f"  idle, {name}: {100 * share['median']:.1f} %" for name, share in shares.items()]
        figures = session.show(comparison, *overhead_lines(comparison), *lines)
        comparisons.append({**figures, "overheads": overheads(comparison)})
    return {"comparisons": comparisons, "idle_shares": idle}


def trace(session: Session) -> Figures:
    """A trace of a network that our loader feeds with arrays, and what it says."""
    (work,) = workloads(session.card, WORKLOADS[:1], session.folder)
    found = traced(session.card, work, lambda: work.ours(session.card), session.trace)
    print(f"trace: {session.trace}")
    print("\n".join(f"  {name}: {value}" for name, value in found.items()) + "\n", flush=True)
    return {"path": str(session.trace), "summary": found}


def first(session: Session) -> Figures:
    """The time to the first batch of JPEGs on the device, in a new process each."""
    folder = session.section_folder("first")
    write_jpegs(folder, 1024 if session.card.is_real else 4)
    names: dict[str, tuple[str, int]] = {"aioload": ("aioload", 0)}
    names |= {f"torch, {num} workers": ("torch", num) for num in [0, *session.num_workers[:1]]}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}

    def epoch(name: str) -> tuple[float, float]:
        loader, num_workers = names[name]
        command = [sys.executable, "-m", "benchmarks.first_on_device", loader, str(folder), str(num_workers)]
        command += [] if session.card.is_real else ["--rehearse"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            message = f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}"
            raise RuntimeError(message)
        found[name].append(json.loads(done.stdout.splitlines()[-1]))
        return 1, found[name][-1]["from_loader_ms"] / 1000

    rivals = [Rival(name=name, epoch=lambda name=name: epoch(name), group=name) for name in names]  # type: ignore[misc]
    title = "first: from the making of the loader to the first batch on the device, new processes"
    able, notes = those_that_run(rivals)
    comparison = compare(title, able, num_rounds=session.num_rounds, unit="ms", num_warming=0)
    comparison.notes[:0] = notes
    return {"comparisons": [session.show(comparison)], "processes": {name: found[name][1:] for name in found}}


SECTIONS: dict[str, Callable[[Session], Figures]] = {
    "copies": copies,
    "trace": trace,
    "ring": ring,
    "steps": steps,
    "first": first,
}


def run(session: Session, names: Sequence[str], report: Path | None) -> Figures:
    """Do the sections, print their figures, and return them; one that fails leaves the others as they are."""
    facts = facts_of_the_run(session.card)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n", flush=True)
    figures: Figures = {"facts": facts, "rounds": session.num_rounds, "sections": {}}
    for name in names:
        start = time.perf_counter()
        if start > session.deadline:
            print(f"{name} is left out: no time is left (--minutes)\n", flush=True)
            continue
        try:
            figures["sections"][name] = SECTIONS[name](session)
        except Exception:
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
            figures["sections"][name] = {"failed": traceback.format_exc()}
        figures["sections"][name]["seconds"] = round(time.perf_counter() - start, 1)
        print(f"{name} took {figures['sections'][name]['seconds']} s\n", flush=True)
        if report is not None:  # what has been measured is not lost with what comes next
            report.write_text(json.dumps(figures, indent=2))
    return figures


def main() -> None:
    """Do what was asked for; the exit code is 1 if a section failed."""
    out = os.environ.get("OUT")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one of warming up")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no section after so long")
    parser.add_argument("--json", type=Path, default=Path(out, "gpu.json") if out else None, help="all figures")
    parser.add_argument("--trace", type=Path, default=Path(out or ".", "gpu-trace.json.gz"), help="where a trace goes")
    parser.add_argument("--rehearse", action="store_true", help="run every line on the CPU, for no figures")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device; --rehearse runs without one")
    without_warnings_of_forks()
    if arguments.rehearse:
        print("rehearsal: no figures\n")
    card: Card = Rehearsal() if arguments.rehearse else CudaCard()
    with tempfile.TemporaryDirectory(prefix="aioload-benchmarks-") as folder:
        session = Session(card, arguments.rounds, arguments.trace, Path(folder), arguments.minutes)
        figures = run(session, arguments.only, arguments.json)
    if any("failed" in section for section in figures["sections"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
