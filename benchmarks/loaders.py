"""The comparison of loaders on small files, photos, tensors, and the wait for the first batch.

Usage: python -m benchmarks.loaders npy|jpeg|tensors|first_batch|all [--rounds N] [--data DIR] [--json FILE]
"""

import argparse
import io
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import aioload
from aioload.readers.local import read_file
from benchmarks.paired import Comparison, Rival, compare, machine
from benchmarks.rivals import (
    Files,
    aioload_epoch,
    aioload_first_batch,
    bare_threads_epoch,
    torch_epoch,
    torch_epoch_started,
    torch_first_batch,
    window_epoch,
)
from benchmarks.samples import NPY_HEADER_BYTES, cache_folder, jpeg_files, npy_files

BATCH_SIZE = 64
IMAGE_SIZE = (224, 224)
NUM_CORES = len(os.sched_getaffinity(0))


def decode_npy(data: bytes, index: int) -> np.ndarray[Any, Any]:
    """Return an array of its own; one that looks into ``data`` is read-only, and torch warns of those."""
    return np.frombuffer(data, np.float32, offset=NPY_HEADER_BYTES).copy()


def decode_jpeg(data: bytes, index: int) -> np.ndarray[Any, Any]:
    """Return 224 x 224 x 3 bytes."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.array(image.resize(IMAGE_SIZE, Image.Resampling.BILINEAR))


def compare_npy(data: Path, num_rounds: int) -> list[Comparison]:
    """Small files in page cache: what the loader itself costs."""
    paths = npy_files(data)
    plain, lean = Files(paths, decode_npy), Files(paths, decode_npy, read_file)
    rivals = [_ours(aioload_epoch(aioload.FileDataset(paths, decode_npy), batch_size=BATCH_SIZE))]
    for num_threads in (2, 4, 8, 32):
        epoch = window_epoch(plain, batch_size=BATCH_SIZE, num_threads=num_threads)
        rivals.append(Rival(name=f"window, {num_threads} threads", epoch=epoch, group="the window of futures"))
    for name, dataset in (("plain reader", plain), ("aioload's reader", lean)):
        epoch = torch_epoch(dataset, batch_size=BATCH_SIZE)
        rivals.append(Rival(name=f"torch, no workers, {name}", epoch=epoch, group="torch without workers"))
    for num_workers in (1, 2, 4):
        rivals += _torch_processes(plain, num_workers)
    return [compare(f"npy: {len(paths):,} files of 4 KB, batches of {BATCH_SIZE}", rivals, num_rounds=num_rounds)]


def compare_jpeg(data: Path, num_rounds: int) -> list[Comparison]:
    """Photos: whether the cores are kept busy decoding."""
    paths = jpeg_files(data)
    files = Files(paths, decode_jpeg)
    bare = bare_threads_epoch(files, num_threads=NUM_CORES)
    rivals = [
        _ours(aioload_epoch(aioload.FileDataset(paths, decode_jpeg), batch_size=BATCH_SIZE)),
        Rival(name=f"{NUM_CORES} bare threads", epoch=bare, group="the ceiling"),
        Rival(
            name="torch, no workers",
            epoch=torch_epoch(files, batch_size=BATCH_SIZE),
            group="torch without workers",
        ),
        *_torch_processes(files, NUM_CORES),
    ]
    title = f"jpeg: {len(paths):,} photos of 500 x 375 to 224 x 224, batches of {BATCH_SIZE}"
    return [compare(title, rivals, num_rounds=num_rounds)]


def compare_tensors(data: Path, num_rounds: int, num_samples: int = 1_000_000) -> list[Comparison]:
    """Tensors in memory: whole epochs of both loaders, in order and shuffled."""
    tensor = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(0))
    comparisons = []
    for shuffle in (False, True):
        arguments = {"batch_size": 256, "shuffle": shuffle}
        theirs = torch_epoch(TensorDataset(tensor), **arguments)
        rivals = [
            _ours(aioload_epoch(aioload.TensorDataset(tensor), **arguments)),
            Rival(name="torch, no workers", epoch=theirs, group="torch without workers"),
        ]
        order = "shuffled" if shuffle else "in order"
        title = f"tensors: {num_samples:,} x 16 float32, batches of 256, {order}"
        comparisons.append(compare(title, rivals, num_rounds=num_rounds))
    return comparisons


def compare_first_batch(data: Path, num_rounds: int) -> list[Comparison]:
    """From ``iter(loader)`` to the first batch of the small files."""
    paths = npy_files(data)
    files = Files(paths, decode_npy)
    rivals = [_ours(aioload_first_batch(aioload.FileDataset(paths, decode_npy), batch_size=BATCH_SIZE))]
    for num_workers in (0, 2):
        epoch = torch_first_batch(files, batch_size=BATCH_SIZE, num_workers=num_workers)
        name = _torch_name(num_workers)
        rivals.append(Rival(name=name, epoch=epoch, group=name))
    return [compare(f"first_batch: of {len(paths):,} npy files", rivals, num_rounds=num_rounds, unit="ms")]


COMPARISONS: dict[str, Callable[[Path, int], list[Comparison]]] = {
    "npy": compare_npy,
    "jpeg": compare_jpeg,
    "tensors": compare_tensors,
    "first_batch": compare_first_batch,
}


def main() -> None:
    """Run the comparisons that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loaders", description=__doc__)
    parser.add_argument("comparison", choices=[*COMPARISONS, "all"])
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, after one of warming up")
    parser.add_argument("--data", type=Path, default=cache_folder(), help="where the files are kept")
    parser.add_argument("--json", type=Path, help="write the figures of every round to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    # More processes than cores: torch advises against it, and here that is one of the settings to try.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    names = list(COMPARISONS) if arguments.comparison == "all" else [arguments.comparison]
    done: list[Comparison] = []
    for name in names:
        for comparison in COMPARISONS[name](arguments.data, arguments.rounds):
            print(comparison.table() + "\n", flush=True)
            done.append(comparison)
    if arguments.json:
        report = {"machine": machine(), "comparisons": [comparison.as_json() for comparison in done]}
        arguments.json.write_text(json.dumps(report, indent=2))


def _ours(epoch: Callable[[], tuple[int, float]]) -> Rival:
    return Rival(name="aioload", epoch=epoch, group="aioload")


def _torch_name(num_workers: int) -> str:
    if num_workers == 0:
        return "torch, no workers"
    return f"torch, {num_workers} process{'es' if num_workers > 1 else ''}"


def _torch_processes(files: Files, num_workers: int) -> list[Rival]:
    """Return torch's loader with its processes started by the clock and before it."""
    arguments = {"batch_size": BATCH_SIZE, "num_workers": num_workers}
    name, group = _torch_name(num_workers), "torch's worker processes"
    return [
        Rival(name=name, epoch=torch_epoch(files, **arguments), group=group),
        Rival(name=f"{name}, started", epoch=torch_epoch_started(files, **arguments), group=group),
    ]


if __name__ == "__main__":
    main()
