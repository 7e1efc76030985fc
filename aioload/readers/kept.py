"""Kept: what a reader makes once and uses again, such as a client with its connections."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_of_parents: list[Any] = []  # never freed: what was made before a fork may wait for threads that are not here


class Kept(Generic[T]):
    """Things of owners, made by whichever thread first asks for one, and gone with their owner.

    They are no attributes of the owner: that would seem to have changed from epoch to epoch, and could not be copied.
    A forked child makes its own.
    """

    def __init__(self) -> None:
        self._shelves: weakref.WeakKeyDictionary[object, _Shelf[T]] = weakref.WeakKeyDictionary()

    def get(self, owner: object, name: str, make: Callable[[], T]) -> T:
        """Return what ``owner`` has by this name; the first time, what ``make`` returns."""
        shelf = self._shelves.get(owner)
        if shelf is None or shelf.pid != os.getpid():
            if shelf is not None:
                _of_parents.append(self._shelves.pop(owner, None))
            shelf = self._shelves.setdefault(owner, _Shelf())
        try:
            return shelf.things[name]
        except KeyError:
            pass
        with shelf.lock:
            if name not in shelf.things:
                shelf.things[name] = make()
            return shelf.things[name]


class _Shelf(Generic[T]):
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.things: dict[str, T] = {}
