"""Handoff: finished batches, from who delivers to the consumer, who sleeps until there is one.

Asking has four answers: a batch, nothing yet (wait), and, for ever after, broken or closed. Whether the pass is
over is for :class:`~aioload.engine.run.Run` to say, which counts.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from aioload.engine.batch import Batch
from aioload.errors import LoaderClosedError


class Handoff:
    """A queue of batches with any number of sleeping consumers, threads or coroutines.

    It is bounded by the window: no more batches are started than may wait here.
    """

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._waiters: deque[Callable[[], None]] = deque()
        self._broken: BaseException | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody sleeps until there is a batch."""
        return bool(self._waiters)

    @property
    def has_news(self) -> bool:
        """Whether :meth:`peek` would return a batch, or raise."""
        return bool(self._batches) or self._closed or self._broken is not None

    def count(self, condition: Callable[[Batch], bool]) -> int:
        """Return how many of the batches fulfil a condition."""
        return sum(map(condition, self._batches.copy()))  # other threads may put and take meanwhile

    def put(self, batch: Batch) -> None:
        """Hand a batch over and wake up whoever sleeps.

        All of them: one that has been cancelled meanwhile must not swallow the only wake-up.
        """
        self._batches.append(batch)
        if self._closed:  # perhaps since a moment ago
            self._batches.clear()
        self.wake_all()

    def break_(self, exc: BaseException) -> None:
        """Have every consumer raise ``exc``, once the batches that were handed over are gone."""
        self._broken = exc
        self.wake_all()

    def close(self) -> None:
        """Have every consumer raise :class:`~aioload.errors.LoaderClosedError`; drop what is here."""
        self._closed = True
        self._batches.clear()
        self.wake_all()

    def wake_all(self) -> None:
        """Let every sleeping consumer look again."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # another thread was faster
                break
            waiter()

    def peek(self) -> Batch | None:
        """Return the next batch and leave it here, or ``None`` if there is nothing yet.

        Raises:
            LoaderClosedError: Closed.
            BaseException: What :meth:`break_` was given.
        """
        if self._closed:
            message = "The loader was closed. Call iter(loader) for a new pass."
            raise LoaderClosedError(message)
        if self._batches:
            return self._batches[0]
        if self._broken is not None:
            raise self._broken
        return None

    def pop(self, batch: Batch) -> None:
        """Remove the batch that :meth:`peek` showed, if it is still the first; the caller owns it."""
        try:
            if self._batches[0] is batch:
                self._batches.popleft()
        except IndexError:  # closed meanwhile
            return

    def thread_waiter(self) -> threading.Lock:
        """Return a lock that is released when it is worth looking again. Look once more before waiting."""
        lock = threading.Lock()
        lock.acquire()
        self._waiters.append(lock.release)
        return lock

    def forget(self, waiter: threading.Lock) -> None:
        """Let a waiter go that has not been released: who waited has given up."""
        with contextlib.suppress(ValueError):  # it has been called meanwhile
            self._waiters.remove(waiter.release)

    @contextlib.contextmanager
    def task_waiter(self) -> "Iterator[asyncio.Future[None]]":
        """Give a future of the running loop that is done when it is worth looking again.

        It is forgotten at the end: a call with a short timeout may be cancelled any number of times.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the consumer's loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish)

        self._waiters.append(wake)
        try:
            yield future
        finally:
            with contextlib.suppress(ValueError):  # it has been called
                self._waiters.remove(wake)
