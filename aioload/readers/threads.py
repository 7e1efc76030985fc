"""Threads: those that calls which block are made in, for what is awaited on an event loop."""

import asyncio
import contextlib
import functools
import io
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from typing import Any


class Threads:
    """The threads of one event loop, as long as any is lent. To be used on that loop only."""

    def __init__(self) -> None:
        self._idle: list[CallThread] = []
        self._num_lent = 0

    @contextlib.contextmanager
    def lend(self) -> Iterator["CallThread"]:
        """Lend a thread for one read; one whose read has failed, or was cancelled, is not lent again."""
        self._num_lent += 1
        # To start one for each read takes three times as long.
        thread = self._idle.pop() if self._idle else CallThread()
        try:
            yield thread
        except BaseException:
            thread.close()
            raise
        else:
            self._idle.append(thread)
        finally:
            self._num_lent -= 1
            while self._num_lent == 0 and self._idle:
                self._idle.pop().close()


# Not a reader's own: what it holds would seem to have changed from epoch to epoch.
_threads: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Threads]" = weakref.WeakKeyDictionary()


def threads_of_this_loop() -> Threads:
    """Return the threads of the event loop that runs here."""
    loop = asyncio.get_running_loop()
    threads = _threads.get(loop)
    if threads is None:
        threads = _threads[loop] = Threads()
    return threads


class CallThread(Executor):
    """A daemon thread that makes the calls of one read after the other; at its end it closes what a read left open.

    Started by the first call. A call whose future is cancelled is made all the same, if it has begun, and its result
    is dropped; nobody is told.
    """

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have the thread call ``function``.

        Raises:
            RuntimeError: The system has no thread to give.
        """
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(function, *args, **kwargs)))
        if self._thread is None:
            thread = threading.Thread(target=_work, args=(self._calls,), name="aioload-aiofiles", daemon=True)
            thread.start()
            self._thread = thread
        return future

    def close(self) -> None:
        """Let the thread close the file and end, after the call it is in. Never waits."""
        self._calls.put(None)


def _work(calls: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    file: io.IOBase | None = None
    while (call := calls.get()) is not None:
        future, function = call
        # The future is never said to run: so it can be cancelled any time, and then tells no loop, closed by now.
        with contextlib.suppress(InvalidStateError):
            if not future.cancelled():
                try:
                    result = function()
                except BaseException as exc:
                    future.set_exception(exc)
                else:
                    file = result if isinstance(result, io.IOBase) else file
                    future.set_result(result)
                    del result
        del call, future, function  # an error's traceback keeps this frame
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
