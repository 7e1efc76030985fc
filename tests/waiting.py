"""A storage of numbers, of which some reads wait until the test lets them go; read by a blocking or an async reader."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from aioload.testing import Gates


class Storage:
    """What is at a number is the number.

    Args:
        waits: Whether a read waits at a gate, given its location and how many reads of that there were before. The
            gate's key is these two. All gates are open after ``with``.

    Attributes:
        gates: The gates.
        num_reads: How often each location was read.
    """

    def __init__(self, waits: Callable[[int, int], bool]) -> None:
        self.gates = Gates()
        self.num_reads: Counter[int] = Counter()
        self._waits, self._lock = waits, threading.Lock()

    def __enter__(self) -> "Storage":
        return self

    def __exit__(self, *_: object) -> None:
        self.gates.open_all()

    def come(self, location: int) -> tuple[int, int] | None:
        """Count a read, and return the key of its gate, if it waits at one."""
        with self._lock:
            number = self.num_reads[location]
            self.num_reads[location] += 1
        return (location, number) if self._waits(location, number) else None


class BlockingReader:
    """Reads a storage in the thread that asks."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def read(self, location: int, offset: int = 0, length: int | None = None) -> bytes:
        key = self.storage.come(location)
        if key is not None:
            self.storage.gates.pass_through(key)
        return b"%d" % location


class AsyncReader:
    """Reads a storage on the loop."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    async def read(self, location: int, offset: int = 0, length: int | None = None) -> bytes:
        key = self.storage.come(location)
        if key is not None:
            await self.storage.gates.pass_through_async(key)
        return b"%d" % location


MakeReader: TypeAlias = Callable[[Storage], Any]
READERS: list[MakeReader] = [BlockingReader, AsyncReader]


class Numbers:
    """Sample ``i`` is ``i``, by way of a location and bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def location(self, index: int) -> int:
        return index

    def decode(self, data: bytes, index: int) -> int:
        assert int(data) == index
        return int(data)
