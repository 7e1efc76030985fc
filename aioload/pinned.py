"""Pinned memory: what one loader has of page-locked memory, which the system can use for nothing else, and no more."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aioload.errors import text_of

_T = TypeVar("_T")

PageLock = Callable[[torch.Tensor], Callable[[], bool]]
"""Page-locks memory that is there; what it returns undoes that, and says whether it could."""


class Living:
    """Pieces of memory that somebody still refers to, through whatever tensor or array. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection inside may run finalizers that come here again
        self._pieces: list[tuple[StorageWeakRef, int]] = []
        self._look_at = 16

    def __repr__(self) -> str:
        return f"<Living at most {self.num_at_most}>"

    @property
    def num_at_most(self) -> int:
        """How many there may be; some of them may be gone."""
        return len(self._pieces)

    def add(self, memory: torch.Tensor) -> None:
        """Note a piece that was in no other call."""
        storage = memory.untyped_storage()
        with self._lock:
            self._pieces.append((StorageWeakRef(storage), storage.nbytes()))  # type: ignore[no-untyped-call]
            if len(self._pieces) >= self._look_at:  # so that what this costs does not grow with what is held
                self.count()
                self._look_at = 2 * len(self._pieces) + 16

    def count(self) -> tuple[int, int]:
        """Return how many there are, and their bytes."""
        with self._lock:
            self._pieces = [each for each in self._pieces if not each[0].expired()]  # type: ignore[no-untyped-call]
            return len(self._pieces), sum(num_bytes for _, num_bytes in self._pieces)


class PinnedMemory:
    """Page-locked memory for the slots of one ring. Any thread may call any method.

    Pieces are powers of two: so batches that grow take a new one few times, and what torch's allocator keeps of those
    that were let go is what is asked for next. It is locked for good then: torch does not give it back to the system.

    Args:
        new_memory: Gives uint8 memory, page-locked, of a number of bytes.
        max_bytes: How many there may be at once.
        page_lock: Locks memory of other origin; see :meth:`lock`.
    """

    def __init__(
        self, new_memory: Callable[[int], torch.Tensor], max_bytes: int, *, page_lock: PageLock | None = None
    ) -> None:
        self._new_memory, self._max_bytes, self._page_lock = new_memory, max_bytes, page_lock
        self._living = Living()
        self._lock = threading.Lock()
        self._failure: tuple[int, str] | None = None  # bytes there were when there was no more to be had, and why

    def __repr__(self) -> str:
        return f"<PinnedMemory {self.num_bytes} of {self._max_bytes} bytes>"

    @property
    def num_bytes(self) -> int:
        """Bytes of the pieces that somebody refers to."""
        return self._living.count()[1]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a piece of at least ``num_bytes``.

        Raises:
            MemoryError: There would be more than ``max_bytes``.
            Exception: There was none to be had, just now or since there was as much.
        """
        size = piece_bytes(num_bytes)
        with self._lock:
            memory = self._had(size, lambda: self._new_memory(size))
            self._living.add(memory)
        return memory

    def lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        """Page-lock a whole mapping that is there and has not been locked; it counts as long as anybody refers to it.

        Returns:
            What undoes it, to be called before the memory is unmapped, and says whether it has.

        Raises:
            Exception: As for :meth:`allocate`.
        """
        page_lock = self._page_lock
        assert page_lock is not None
        with self._lock:
            undo = self._had(memory.untyped_storage().nbytes(), lambda: page_lock(memory))
            self._living.add(memory)
        return undo

    def _had(self, size: int, take: Callable[[], _T]) -> _T:
        """Return what ``take`` gives, if so many bytes more may be had, and note if they are not."""
        present = self.num_bytes
        if present + size > self._max_bytes:
            message = f"{present + size} bytes of it would be more than the {self._max_bytes} that this loader may have"
            raise MemoryError(message)
        if self._failure is not None and present >= self._failure[0]:
            message = f"there was none to be had beyond {self._failure[0]} bytes: {self._failure[1]}"
            raise MemoryError(message)
        try:
            taken = take()
        except Exception as exc:
            self._failure = present, text_of(exc)  # not the error, whose traceback keeps whoever waits alive
            raise
        self._failure = None
        return taken


def piece_bytes(num_bytes: int) -> int:
    """Return the size of a piece for ``num_bytes``: the next power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()
