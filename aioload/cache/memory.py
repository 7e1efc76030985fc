"""Memory: bytes kept in the process, from one epoch to the next."""

import itertools
from collections import deque
from typing import Any

from aioload.arguments import whole_number
from aioload.cache.admission import Admission
from aioload.cache.base import key_of
from aioload.cache.lock import Lock

OVERHEAD_BYTES = 320
"""What an entry takes beside its content, by tracemalloc: its key, its places in the dict and the queue, itself."""

_LOOK_AT = 64  # entries, for what may go
_SLACK = 1.25


class MemoryCache:
    """Keeps what was read in this process's memory, for later epochs and for other loaders that it is given to.

    When it is full, what is in it stays, and nothing more comes in: of a set twice as large as the cache, each epoch
    finds half. Only what has not been asked for during about two whole epochs makes room for others. It is for files
    that nobody changes; :meth:`clear` forgets them.

    Any number of threads may use one. A forked process has a copy of it. Pickled, or deep-copied with its loader, it
    is a new and empty one.

    Args:
        max_bytes: The most bytes that it may take: of content, and 320 for each entry's key and place.

    Raises:
        ArgumentError: ``max_bytes`` is no whole number of at least 1.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = whole_number("max_bytes", max_bytes, 1)
        self._lock = Lock()
        self.generation = 0
        """Changes whenever the cache is cleared."""
        self._begin()

    def __repr__(self) -> str:
        return f"MemoryCache(max_bytes={self.max_bytes})"

    def __reduce__(self) -> Any:
        return type(self), (self.max_bytes,)

    @property
    def used_bytes(self) -> int:
        """How much of ``max_bytes`` is used."""
        return self._used_bytes

    def get(self, location: Any) -> bytes | None:
        """Return the bytes of a location, or ``None`` if they are not there.

        Raises:
            DatasetError: ``location`` is nothing that can be told apart: see :func:`~aioload.cache.key_of`.
        """
        key = key_of(location)
        now = next(self._clock)
        if not hash(key) & self._admission.mask:
            self._admission.note(key, now)
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.last_used = now
        return entry.data

    def put(self, location: Any, data: bytes, generation: int | None = None) -> None:
        """Keep the bytes of a location, if there is room for them and they are not there yet.

        Args:
            location: The location.
            data: Its bytes.
            generation: What :attr:`generation` was before they were read; if it has changed, they are not kept.

        Raises:
            DatasetError: As :meth:`get`.
        """
        key = key_of(location)
        with self._lock:
            if generation is not None and generation != self.generation:
                return
            if key not in self._entries and self._has_room(_size_of(data)):
                self._entries[key] = _Entry(data, next(self._clock))
                self._queue.append(key)
                self._used_bytes += _size_of(data)

    def clear(self) -> None:
        """Forget everything. What loaders have begun to read before is not kept either, for the rest of their pass."""
        with self._lock:
            self.generation += 1
            self._begin()

    def _begin(self) -> None:
        self._clock = itertools.count()
        self._admission = Admission(0, _SLACK)
        self._entries: dict[str, _Entry] = {}
        self._queue = deque[str]()  # of the keys, from where the next look begins
        self._used_bytes = 0

    def _has_room(self, size: int) -> bool:
        """Whether ``size`` bytes fit, now or when what may go has gone."""
        if self._used_bytes + size <= self.max_bytes:
            return True
        if size > self.max_bytes or not self._admission.is_worth_a_look():
            return False
        now, found = next(self._clock), False
        for _ in range(min(_LOOK_AT, len(self._queue))):
            key = self._queue.popleft()
            entry = self._entries[key]
            if not self._admission.may_go(entry.last_used, now):
                self._queue.append(key)
                continue
            found = True
            del self._entries[key]
            self._used_bytes -= _size_of(entry.data)
            if self._used_bytes + size <= self.max_bytes:
                break
        self._admission.looked(found=found)
        return self._used_bytes + size <= self.max_bytes


class _Entry:
    __slots__ = ("data", "last_used")

    def __init__(self, data: bytes, last_used: int) -> None:
        self.data, self.last_used = data, last_used


def _size_of(data: bytes) -> int:
    return len(data) + OVERHEAD_BYTES
