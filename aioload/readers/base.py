"""Reader: what fetches the bytes of samples, and the part of a file that it may be asked for."""

import inspect
import reprlib
from collections.abc import Awaitable
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from aioload.arguments import whole_number
from aioload.errors import DatasetError

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""What a reader returns. Anything else with the buffer protocol will do at run time."""


@runtime_checkable
class Reader(Protocol):
    """What a loader's ``reader`` is: from a location to its bytes.

    ``read`` is a plain function, which may block, or ``async def``. The loader calls a plain one on its read threads,
    and awaits an async one on its event loop, up to 256 at once of either, or ``num_concurrent_reads``, so it must bear
    being called while other calls are under way. All of an async reader runs on one loop, in the loader's thread, for
    as long as the loader lives, so what is bound to the loop (a session) may be kept over epochs; it must never block.
    (With ``num_workers=0`` it is awaited in the consumer's thread, in ``async for`` on the loop that runs there.)

    The loader calls nothing but ``read``. It does not close a reader, for several loaders may share one: if it has a
    ``close``, plain or async, who made it calls that, after the last loader that uses it. Those in this package have
    none: the connections that some keep go with the reader. What must be closed on the loader's loop can be held by a
    task that the reader starts there: tasks are cancelled, and waited for, when the loader is closed.
    """

    def read(self, location: Any, offset: int = 0, length: int | None = None) -> "BytesLike | Awaitable[BytesLike]":
        """Return bytes of what is at ``location``, or an awaitable of them; ``decode`` is given that very object.

        Args:
            location: What the dataset's ``location(index)`` returned.
            offset: The first byte wanted. The loader itself wants everything, and leaves offset and length out.
            length: Number of bytes wanted, ``None`` for all that follow. A range that goes past the end gives what
                there is.

        Returns:
            Bytes that nobody writes to or takes away as long as anything refers to the object.

        Raises:
            Exception: It cannot be read. The consumer gets that very object, with a note that names the sample.
        """
        ...


class Range(NamedTuple):
    """Which bytes of a file are wanted: ``length`` of them (``None``: all) from ``offset`` on."""

    offset: int
    length: int | None

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole file, whatever its size."""
        return self.offset == 0 and self.length is None

    def within(self, size: int) -> tuple[int, int]:
        """Return where it begins and ends in a file of ``size`` bytes; both are the size if it lies past the end."""
        start = min(self.offset, size)
        return start, size if self.length is None else min(size, start + self.length)

    def of(self, content: bytes) -> bytes:
        """Return that part of the content of a file."""
        start, stop = self.within(len(content))
        return content[start:stop]


def checked_range(offset: int, length: int | None) -> Range:
    """Return the range that a reader is asked for.

    Raises:
        ArgumentError: One of the two is no whole number, or negative.
    """
    return Range(whole_number("offset", offset, 0), None if length is None else whole_number("length", length, 0))


def is_async(reader: Reader) -> bool:
    """Whether ``reader.read`` is to be awaited."""
    return inspect.iscoroutinefunction(reader.read)


def num_bytes(data: Any, reader: Reader) -> int:
    """Return the size of what ``reader`` returned.

    Raises:
        DatasetError: It does not give access to bytes.
    """
    if type(data) is bytes:
        return len(data)
    try:
        return memoryview(data).nbytes
    except TypeError:
        pass
    message = (
        f"{type(reader).__name__}.read must return bytes or what has the buffer protocol, got {reprlib.repr(data)}."
    )
    if inspect.iscoroutine(data):
        data.close()
        message += (
            " Declare it 'async def' (a wrapper that hides it must be 'async def' too), and the loader awaits it."
        )
    raise DatasetError(message)
