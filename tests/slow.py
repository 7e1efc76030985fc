"""Slow: datasets of the numbers from 0, for scripts that end, are interrupted or fork while samples are loaded."""

import asyncio
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from aioload import DataLoader
from aioload.testing import AsyncGatedDataset, GatedDataset, GatedFiles, GatedItems


class Slow:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        if index > 2:
            time.sleep(0.5)
        return index


class AsyncSlow(Slow):
    async def __getitem__(self, index: int) -> Any:
        if index > 2:
            await asyncio.sleep(0.5)
        return index


class Stuck(Slow):
    """From 3 on no sample ever comes."""

    def __getitem__(self, index: int) -> Any:
        if index > 2:
            threading.Event().wait()
        return index


class AsyncStuck(Slow):
    """As :class:`Stuck`, and refuses to be cancelled."""

    async def __getitem__(self, index: int) -> Any:
        while index > 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        return index


class LoopBlocking(Slow):
    async def __getitem__(self, index: int) -> Any:
        threading.Event().wait()


class Odd(Slow):
    """Warns of each sample."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        warnings.warn(f"sample {index} is odd", stacklevel=2)
        return index


class Computing(Slow):
    """Spends its time in torch, without the interpreter's lock."""

    def __getitem__(self, index: int) -> Any:
        matrix = torch.ones(400, 400)
        for _ in range(20 if index > 2 else 0):
            matrix = matrix @ matrix
        return index


class Interrupting(Slow):
    """Ctrl-C comes once: while sample 3 is loaded, and after ``consumed`` has been set."""

    def __init__(self) -> None:
        self.consumed = threading.Event()
        self.interrupted = False

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            self.consumed.wait()
            self.interrupt()
        return index

    def interrupt(self) -> None:
        if not self.interrupted:
            self.interrupted = True
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)


class AsyncInterrupting(Interrupting):
    async def __getitem__(self, index: int) -> Any:
        if index == 3:
            await asyncio.to_thread(self.consumed.wait)
            self.interrupt()
            await asyncio.sleep(0)
        return index


class Live:
    """A loader of each kind, and iterators from which one batch has been taken."""

    def __init__(self) -> None:
        files = GatedFiles(Path(tempfile.mkdtemp()), 20, opened=True)
        others = [kind(20, opened=True) for kind in (GatedDataset, AsyncGatedDataset, GatedItems)]
        self.loaders = [
            DataLoader(dataset, num_workers=num_workers, persistent_workers=num_workers == 3)
            for dataset in (files, *others)
            for num_workers in (0, 2, 3)
        ]
        self.iterators: Sequence[Iterator[Any]] = [iter(loader) for loader in self.loaders]
        self._heads = [next(iterator) for iterator in self.iterators]

    def load_all(self) -> None:
        """Have each loader load all."""
        for loader in self.loaders:
            assert [int(batch) for batch in loader] == list(range(20))

    def go_on(self) -> None:
        """Take the rest from the iterators."""
        for head, iterator in zip(self._heads, self.iterators, strict=True):
            assert [int(batch) for batch in (head, *iterator)] == list(range(20))
