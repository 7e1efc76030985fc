"""Mapped: files as views of the page cache, for large files of which no second copy is wanted."""

import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np

from aioload.readers.base import checked_range
from aioload.readers.local import opened, read_range, size_of
from aioload.types import Location

# Python's own mmap keeps a descriptor as long as the memory lives (up to 3.12), so that held samples use them up.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class MmapReader:
    """Maps files into memory: no copy is made, and none of the process's own memory is used.

    ``decode`` gets a read-only ``memoryview`` of bytes (as read-only as ``bytes``; ``bytes(data)`` makes a copy). Its
    memory stays as long as any view of it lives, be it a slice, an array by ``numpy.frombuffer`` or a tensor of that,
    and no descriptor is kept. The file is read by ``read`` itself, not by ``decode`` when it looks, which would hold
    the interpreter lock meanwhile; the call blocks, without the lock. Any number of threads may use one reader.

    For files that nobody changes in place: what is written to the file shows in the views, and looking at what has
    been cut off it, or cannot be read any more, kills the process (``SIGBUS``). Replacing a file by another of the
    same name is safe. Small files are read faster than they are mapped.
    """

    # From page cache: 4 KB in 38 us, where a read takes 8; 64 MB in 1 ms where a read takes 50.

    def read(self, location: Location, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """Map a file, or ``length`` bytes of it from ``offset`` on; what cannot be mapped is read.

        Args:
            location: The file's path.
            offset: The first byte wanted.
            length: Number of bytes wanted, ``None`` for all that follow; past the end, it gives what there is.

        Returns:
            A read-only view, of format ``"B"``; ``bytes`` if there is nothing, or of a pipe, a device or ``/proc``.

        Raises:
            ArgumentError: ``offset`` or ``length`` is negative, or no whole number.
            OSError: As :func:`~aioload.readers.read_file`.
        """
        wanted = checked_range(offset, length)
        with opened(location) as fd:
            start, stop = wanted.within(size_of(fd))
            if start < stop:
                try:
                    return _map(fd, start, stop)
                except OSError as error:
                    if error.errno != errno.ENODEV:  # a file system that knows no maps
                        raise
            return read_range(fd, wanted)


class _Mapping:
    """Pages of a file, unmapped when the last array over them is gone."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        # MAP_POPULATE reads them now, and on a read-only map does not copy them: mmap(2).
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        address = _libc.mmap(None, size, mmap.PROT_READ, flags, fd, offset)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address, self._size = address, size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": (self._address, True)}

    def __del__(self, unmap: Any = _libc.munmap) -> None:  # when the interpreter ends, names may be gone before us
        if hasattr(self, "_address"):
            unmap(self._address, self._size)


def _map(fd: int, start: int, stop: int) -> memoryview:
    aligned = start - start % mmap.ALLOCATIONGRANULARITY
    array: Any = np.asarray(_Mapping(fd, aligned, stop - aligned))
    view = memoryview(array)  # which keeps the array, which keeps the pages
    return view[start - aligned :]
