"""Aiofiles: local files by the ``aiofiles`` package, for code that has to read in coroutines."""

import asyncio
import contextlib
import functools
import io
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from typing import Any

import aiofiles
import aiofiles.os

from aioload.readers.base import Range, checked_range
from aioload.types import Location


class AiofilesReader:
    """Reads files in coroutines, by ``aiofiles``; :class:`~aioload.readers.LocalReader` is faster.

    It takes nothing of the event loop that it runs on, not the loop's default executor either: each read has a thread
    to itself, from opening to closing. So there are as many threads as reads under way, and when none is under way on
    a loop, that loop's threads end: there is nothing to close. A read that is cancelled lets go at once; its thread, a
    daemon, ends after the call it is in and closes the file. Any number of event loops may use one reader.
    """

    async def read(self, location: Location, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or ``length`` bytes of it from ``offset`` on.

        Args:
            location: The file's path.
            offset: The first byte wanted.
            length: Number of bytes wanted, ``None`` for all that follow; past the end, it gives what there is.

        Returns:
            The bytes, owned by the caller.

        Raises:
            ArgumentError: ``offset`` or ``length`` is negative, or no whole number.
            OSError: As :func:`~aioload.readers.read_file`.
        """
        wanted = checked_range(offset, length)
        path: object = location
        if not isinstance(path, str | bytes | os.PathLike):  # open() takes a number for a descriptor
            message = f"location must be a path (str, bytes or os.PathLike), got {location!r}"
            raise TypeError(message)
        with _threads_of_this_loop().lend() as thread:
            try:
                # Not "async with", which closes on the loop's default executor, whatever executor it was given.
                file = await aiofiles.open(location, "rb", executor=thread)
                data = await _read(file, wanted, thread)
                await file.close()
            except OSError as error:
                error.filename = os.fspath(location)
                raise
        return data


async def _read(file: Any, wanted: Range, thread: "_Thread") -> bytes:
    if wanted.is_whole:
        data: bytes = await file.read()
        return data
    size = (await aiofiles.os.stat(file.fileno(), executor=thread)).st_size
    if size == 0:  # a pipe, a device or /proc
        return wanted.of(await file.read())
    start, stop = wanted.within(size)
    await file.seek(start)
    data = await file.read(stop - start)
    return data


class _Threads:
    """The threads of one event loop, as long as any is lent. To be used on that loop only."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._num_lent = 0

    @contextlib.contextmanager
    def lend(self) -> Iterator["_Thread"]:
        """Lend a thread for one read; one whose read has failed, or was cancelled, is not lent again."""
        self._num_lent += 1
        thread = self._idle.pop() if self._idle else _Thread()  # to start one for each read takes three times as long
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


# Not the reader's own: what it holds would seem to have changed from epoch to epoch.
_threads: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads]" = weakref.WeakKeyDictionary()


def _threads_of_this_loop() -> _Threads:
    loop = asyncio.get_running_loop()
    threads = _threads.get(loop)
    if threads is None:
        threads = _threads[loop] = _Threads()
    return threads


class _Thread(Executor):
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
