"""Serve batches to two workers of an asyncio program, whose own event loop stays free meanwhile."""

import asyncio
import io
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiofiles
import numpy as np
import torch

import aioload


class Recordings:
    """Recordings in files. The loader awaits many ``__getitem__`` at once, on a loop of its own."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.paths)

    async def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        """Return a recording and its number."""
        async with aiofiles.open(self.paths[index], "rb") as file:
            return np.load(io.BytesIO(await file.read())), index


def record(root: Path) -> None:
    """Write 2,000 recordings of noise."""
    rng = np.random.default_rng(0)
    for number in range(2_000):
        np.save(root / f"{number:04}.npy", rng.normal(size=4096).astype(np.float32))


async def work(batches: AsyncIterator[Any], served: list[int]) -> None:
    """Handle one batch after the other; what takes more than a moment runs in a thread, not on the loop."""
    async for recordings, numbers in batches:
        await asyncio.to_thread(torch.fft.rfft, recordings)
        served += numbers.tolist()


async def watch(lags_s: list[float]) -> None:
    """Note how late the loop wakes this task each time: any other request would have waited as long."""
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        lags_s.append(time.perf_counter() - due)


async def main(root: Path) -> None:
    """Serve every recording below ``root`` once.

    The workers share one iterator: had each its own, every file would be read twice.
    """
    first, second, lags_s = list[int](), list[int](), list[float]()
    loader = aioload.DataLoader(Recordings(root), batch_size=50)
    watcher = asyncio.create_task(watch(lags_s))
    async with loader:
        batches = aiter(loader)
        await asyncio.gather(work(batches, first), work(batches, second))
    watcher.cancel()
    print(f"{loader.stats().batches} batches, {len({*first, *second})} different recordings", end=", ")
    print(f"{len(first)} + {len(second)} by worker; worst lag of the loop {max(lags_s) * 1e3:.1f} ms")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))
        asyncio.run(main(Path(folder)))
