"""The first batch on a device, in a process of its own; prints JSON: milliseconds, from two beginnings.

Usage: python -m benchmarks.first_on_device aioload|torch FOLDER NUM_WORKERS [--rehearse]
"""

import time

STARTED = time.perf_counter()  # before anything large is imported

import argparse  # noqa: E402
import json  # noqa: E402
from contextlib import closing  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


def first_batch(loader_name: str, folder: Path, num_workers: int, *, is_real: bool) -> dict[str, float]:
    """Load one batch of the JPEGs in ``folder`` onto the device."""
    import aioload
    from benchmarks.cards import Card, CudaCard, Rehearsal, without_warnings_of_forks
    from benchmarks.gpu_training import Decode, Workload

    without_warnings_of_forks()
    card: Card = CudaCard() if is_real else Rehearsal()
    card.backend.copy(card.backend.host_memory(1))  # what CUDA does on first use is no loader's work
    card.synchronize()
    dataset = aioload.FileDataset(sorted(map(str, folder.glob("*.jpg"))), Decode(224))
    work = Workload("", lambda images, labels: None, dataset, min(128, len(dataset)), 1)
    start = time.perf_counter()
    loader: Any = work.ours(card) if loader_name == "aioload" else work.torchs(card, num_workers)
    with closing(loader), closing(iter(loader)) as batches:
        next(batches)
        card.synchronize()
        end = time.perf_counter()
    return {"from_loader_ms": 1000 * (end - start), "from_start_ms": 1000 * (end - STARTED)}


def main() -> None:
    """Do it once."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_on_device", description=__doc__)
    parser.add_argument("loader", choices=["aioload", "torch"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_workers", type=int)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    figures = first_batch(arguments.loader, arguments.folder, arguments.num_workers, is_real=not arguments.rehearse)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
