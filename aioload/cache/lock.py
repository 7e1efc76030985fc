"""Lock: one that a forked child finds open, though a thread that exists in the parent alone had it."""

import os
import threading
import weakref


class Lock:
    """As ``threading.Lock``, for ``with`` statements."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be open."""
        self._lock = threading.Lock()


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
