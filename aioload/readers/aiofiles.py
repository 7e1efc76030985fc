"""Aiofiles: local files by the ``aiofiles`` package, for code that has to read in coroutines."""

import os
from typing import Any

import aiofiles
import aiofiles.os

from aioload.readers.base import Range, checked_range
from aioload.readers.threads import CallThread, threads_of_this_loop
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
        with threads_of_this_loop().lend() as thread:
            try:
                # Not "async with", which closes on the loop's default executor, whatever executor it was given.
                file = await aiofiles.open(location, "rb", executor=thread)
                data = await _read(file, wanted, thread)
                await file.close()
            except OSError as error:
                error.filename = os.fspath(location)
                raise
        return data


async def _read(file: Any, wanted: Range, thread: "CallThread") -> bytes:
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
