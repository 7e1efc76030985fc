"""Gates: what code under test comes to and a test opens; datasets whose samples wait at them."""

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Self

import torch.utils.data

DEADLINE_S = 60.0
"""Whoever waits at a gate, or for somebody to come to one, waits no longer than this."""


class Gates:
    """A gate for each key, which code under test comes to and a test opens. Any thread may call any method.

    Keys are what the test likes: indices of samples, or names of other places (``"collate"``).

    Args:
        opened: Whether gates are open from the start.

    Attributes:
        started: The keys that somebody came to the gate of, in that order.
        finished: The keys that somebody went through the gate of, in that order.
        threads: The name of the thread that last came to the gate of each key.
        max_in_flight: The most that were between coming and having gone through at once.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self.started: list[Any] = []
        self.finished: list[Any] = []
        self.threads: dict[Hashable, str] = {}
        self.max_in_flight = 0
        self._all_open = opened
        self._open: set[Hashable] = set()
        self._errors: dict[Hashable, BaseException] = {}
        self._wakers: list[Callable[[], object]] = []
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<Gates started={self.started} finished={self.finished}>"

    @property
    def in_flight(self) -> int:
        """How many are between coming and having gone through."""
        return len(self.started) - len(self.finished)

    # For the test.

    def open(self, *keys: Hashable) -> None:
        """Let those at the gates of ``keys`` go, and those who come later."""
        with self._changed:
            self._open.update(keys)
            self._notify()

    def open_all(self) -> None:
        """Open every gate, for good."""
        with self._changed:
            self._all_open = True
            self._notify()

    def fail(self, key: Hashable, error: BaseException) -> None:
        """Have ``error``, that very object, raised at the gate of ``key`` when it is open."""
        self._errors[key] = error

    def wait_started(self, *keys: Hashable) -> None:
        """Wait until somebody has come to the gate of each of ``keys``.

        Raises:
            AssertionError: It took longer than :data:`DEADLINE_S`; so in all that wait.
        """
        self._wait(lambda: set(keys) <= set(self.started), f"{keys} to start")

    def wait_num_started(self, count: int) -> None:
        """Wait until somebody has come to a gate ``count`` times."""
        self._wait(lambda: len(self.started) >= count, f"{count} to start")

    def wait_finished(self, *keys: Hashable) -> None:
        """Wait until somebody has gone through the gate of each of ``keys``."""
        self._wait(lambda: set(keys) <= set(self.finished), f"{keys} to finish")

    # For the code under test.

    def pass_through(self, key: Hashable) -> None:
        """Wait until the gate of ``key`` is open, and go through.

        Raises:
            AssertionError: Nobody opened it.
            BaseException: What :meth:`fail` was given for ``key``.
        """
        self._come(key)
        try:
            self._wait(lambda: self.is_open(key), f"the gate of {key!r} to be opened")
            self._raise_error(key)
        finally:
            self._go(key)

    async def pass_through_async(self, key: Hashable) -> None:
        """As :meth:`pass_through`; the running event loop goes on meanwhile."""
        changed = asyncio.Event()
        wake = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, changed.set)
        self._come(key, wake)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not self.is_open(key):
                    await changed.wait()
                    changed.clear()
            self._raise_error(key)
        finally:
            self._go(key, wake)

    def is_open(self, key: Hashable) -> bool:
        """Whether the gate of ``key`` is open."""
        return self._all_open or key in self._open

    def _come(self, key: Hashable, wake: Callable[[], object] | None = None) -> None:
        with self._changed:
            self.started.append(key)
            self.threads[key] = threading.current_thread().name
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            self._notify()
            if wake is not None:
                self._wakers.append(wake)

    def _go(self, key: Hashable, wake: Callable[[], object] | None = None) -> None:
        with self._changed:
            if wake is not None:
                self._wakers.remove(wake)
            self.finished.append(key)
            self._notify()

    def _raise_error(self, key: Hashable) -> None:
        if key in self._errors:
            raise self._errors[key]

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, DEADLINE_S):
                message = f"Waited {DEADLINE_S:g} s for {what}: {self!r}."
                raise AssertionError(message)

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()


class _Gated:
    """A dataset of ``size`` samples. Its ``gates`` go by index; at the end of ``with`` they are all opened."""

    def __init__(self, size: int, *, opened: bool = False) -> None:
        self.size = size
        self.gates = Gates(opened=opened)

    def __len__(self) -> int:
        return self.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gates.open_all()


class GatedDataset(_Gated):
    """A map-style dataset whose sample ``index`` is the number ``index``, when the test has opened its gate."""

    def __getitem__(self, index: int) -> int:
        """Return ``index``. Blocks until its gate is open."""
        self.gates.pass_through(index)
        return index


class AsyncGatedDataset(_Gated):
    """As :class:`GatedDataset`, awaited."""

    async def __getitem__(self, index: int) -> int:
        """Return ``index`` when its gate is open."""
        await self.gates.pass_through_async(index)
        return index


class GatedItems(_Gated, torch.utils.data.IterableDataset[int]):
    """An iterable dataset of the numbers below ``size``, each of which comes when the test has opened its gate."""

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the numbers."""
        for index in range(self.size):
            self.gates.pass_through(index)
            yield index


class GatedFiles(_Gated):
    """A dataset with ``location`` and ``decode``, over files of which the test decides when they can be opened.

    Sample ``index`` is the number ``index``, read from a file that is made in ``folder``. ``gates`` hold up whoever
    opens the file; ``decodes``, open from the start unless told otherwise, hold up its decoding.
    """

    def __init__(self, folder: Path, size: int, *, opened: bool = False, decodes_opened: bool = True) -> None:
        super().__init__(size, opened=opened)
        self.decodes = Gates(opened=decodes_opened)
        self.folder = folder
        for index in range(size):
            (folder / f"{index}.txt").write_text(str(index))

    def __getitem__(self, index: int) -> int:
        """Return ``index``, read and decoded on the calling thread."""
        return self.decode(Path(self.location(index)).read_bytes(), index)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.decodes.open_all()

    def location(self, index: int) -> "os.PathLike[str]":
        """Return the path of the file, which can be opened when the gate is open."""
        return _GatedPath(self.folder / f"{index}.txt", index, self.gates)

    def decode(self, data: bytes, index: int) -> int:
        """Return the number in ``data``. Blocks until its gate of ``decodes`` is open."""
        self.decodes.pass_through(index)
        return int(data)


class _GatedPath(os.PathLike[str]):
    """A path that only the first to open it must wait for; ``str`` never does."""

    def __init__(self, path: Path, index: int, gates: Gates) -> None:
        self._path, self._index, self._gates = path, index, gates
        self._passed = False

    def __str__(self) -> str:
        return str(self._path)

    def __fspath__(self) -> str:
        if not self._passed:
            self._passed = True
            self._gates.pass_through(self._index)
        return str(self._path)
