"""Cache: what a loader asks for the bytes at a location before it reads them, and how locations are told apart."""

import operator
import os
import reprlib
from typing import Any, Protocol, runtime_checkable

from aioload.errors import DatasetError


@runtime_checkable
class Cache(Protocol):
    """What a loader's ``cache`` is: from a location to the bytes that were read there before.

    Any number of threads may call both methods at once, and several loaders may share one cache. Neither is to raise
    because something cannot be kept, or cannot be found any more: then it is read again.
    """

    def get(self, location: Any) -> bytes | None:
        """Return the bytes of a location, whole and as they were put there, or ``None`` if they are not there."""
        ...

    def put(self, location: Any, data: bytes) -> None:
        """Keep the bytes of a location, if there is room for them and they are not there yet."""
        ...


def key_of(location: Any) -> str:
    """Return what stands for a location in a cache: the same in every process and every run, for the same bytes.

    A path that is not absolute belongs to the folder that the process is in, whatever the reader makes of it: so that
    the file of the same name elsewhere is not taken for it.

    Args:
        location: A path or URL (``str``, ``bytes`` or ``os.PathLike``), a whole number, or a tuple of such.

    Raises:
        DatasetError: It is something else, of which nobody knows what it will look like next time.
    """
    if type(location) is str:
        path = location
    elif isinstance(location, str | bytes | os.PathLike):
        path = os.fsdecode(location)
    else:
        return f"\0{_written(location)}"  # which no path begins with
    if path.startswith("/") or "://" in path:
        return path
    return f"{os.getcwd()}/{path}"


def _written(location: Any) -> str:
    if isinstance(location, str | bytes | os.PathLike):
        return repr(key_of(location))
    if isinstance(location, tuple):
        return f"({','.join(map(_written, location))})"
    try:
        return str(operator.index(location))
    except TypeError:
        message = (
            "A cache needs locations that are the same in every run: paths, URLs, whole numbers or tuples of these; "
            f"got {reprlib.repr(location)}. Have location() return one, or leave cache out."
        )
        raise DatasetError(message) from None
