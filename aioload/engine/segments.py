"""Segments: memory that two processes see, without a name, so that nothing is left of it when both are gone.

It is an anonymous file (``memfd_create``), which neither needs ``/dev/shm`` nor counts against its size, or else a
temporary file that is deleted at once.
"""

import ctypes
import errno
import functools
import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aioload.engine.shortage import explained

_FAILED = ctypes.c_void_p(-1).value

_MAPPED_AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)
"""The pages are there already: to map each when a row is first written to it takes a microsecond for every 4 KB."""


class Segments:
    """The memory of the slots of a process that fills them for another one. Any thread may call any method.

    Args:
        size_of: Returns how large a segment is to be for a number of bytes.

    Attributes:
        dropped: The numbers of segments that are gone here, for the other process to let go.
    """

    def __init__(self, size_of: Callable[[int], int] | None = None) -> None:
        self.dropped: deque[int] = deque()
        self._size_of = size_of
        self._numbers = itertools.count()
        self._by_address: dict[int, int] = {}
        self._files: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Segments {sorted(self._by_address.values())}>"

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        """Return a new segment, of that size at least, as the memory of a slot.

        Raises:
            OSError: There is no room.
        """
        if self._size_of is not None:
            num_bytes = self._size_of(num_bytes)
        file = new_file(num_bytes)
        try:
            mapping, _ = _mapped(file, num_bytes, mmap.MAP_SHARED | _MAPPED_AT_ONCE)
        except BaseException:
            os.close(file)
            raise
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        address, number = memory.data_ptr(), next(self._numbers)
        self._by_address[address], self._files[number] = number, file
        weakref.finalize(mapping, self._gone, address, number).atexit = False
        return memory

    def number_of(self, address: int) -> int:
        """Return the number of the segment whose memory begins there."""
        return self._by_address[address]

    def take_file(self, number: int) -> int | None:
        """Return the file of a segment, which is the caller's, the first time that it is asked for."""
        return self._files.pop(number, None)

    def _gone(self, address: int, number: int) -> None:
        if self._by_address.get(address) == number:
            del self._by_address[address]
        file = self._files.pop(number, None)
        if file is not None:
            os.close(file)
        else:
            self.dropped.append(number)


class Mapping:
    """Another process's segment, which stays mapped as long as ``memory``, a uint8 tensor, or anything made from it.

    Args:
        file: The segment's, which is closed.
    """

    def __init__(self, file: int) -> None:
        try:
            mapping, self._ahead = _mapped(file, os.fstat(file).st_size)
        finally:
            os.close(file)
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)

    def __repr__(self) -> str:
        return f"<Mapping {len(self.memory)} bytes at {self.memory.data_ptr():#x}>"

    def before_unmapping(self, function: Callable[[], bool]) -> None:
        """Have ``function`` called first, on whatever thread, the latest before those that were given earlier.

        If it returns ``False``, these are not called, and the memory stays mapped. When the interpreter ends, nothing
        is called, nor unmapped.
        """
        self._ahead.append(function)


def map_file(file: int) -> memoryview:
    """Return the memory that a file is, which is closed: other processes that map it see what is written there."""
    return _view_of(file, mmap.MAP_SHARED)


def map_own(file: int) -> memoryview:
    """Return the memory that a file is, to which only this process writes; the file is closed.

    Pages are those of all who map it, until they are written to.
    """
    return _view_of(file, mmap.MAP_PRIVATE)


def _view_of(file: int, flags: int) -> memoryview:
    try:
        mapping, _ = _mapped(file, os.fstat(file).st_size, flags)
    finally:
        os.close(file)
    return np.frombuffer(mapping, np.uint8).data  # which can be cast: that of a ctypes array cannot


def _mapped(file: int, num_bytes: int, flags: int = mmap.MAP_SHARED) -> tuple[Any, list[Callable[[], bool]]]:
    """Return memory as a buffer, which is there as long as the buffer or anything made from it; and what comes then.

    A ``mmap.mmap`` would keep the file open as well (before Python 3.13), and a consumer may hold as many batches as
    it likes, which are more than the files that it may have open.
    """
    library = _library()
    address = library.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{num_bytes} bytes of shared memory could not be mapped: {os.strerror(code)}")
    mapping = (ctypes.c_uint8 * num_bytes).from_address(address)
    ahead: list[Callable[[], bool]] = []
    weakref.finalize(mapping, _unmap, address, num_bytes, ahead).atexit = False
    return mapping, ahead


def _unmap(address: int, num_bytes: int, ahead: list[Callable[[], bool]]) -> None:
    if all(function() for function in reversed(ahead)):
        _library().munmap(address, num_bytes)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, size]
    return library


def new_file(num_bytes: int) -> int:
    """Return a file without a name, to be mapped by several processes; one of 0 bytes is to be written to first.

    Raises:
        OSError: There is no room.
    """
    with explained(f"{num_bytes} bytes of shared memory" if num_bytes else "Shared memory"):
        try:
            file = os.memfd_create("aioload", os.MFD_CLOEXEC)
        except (AttributeError, OSError) as exc:  # another system, or a sandbox that knows no such call
            if getattr(exc, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise
            with tempfile.TemporaryFile(prefix="aioload-") as temporary:
                file = os.dup(temporary.fileno())
        try:
            # All of it now: where there is too little, that is an error here, and no SIGBUS when a row is written.
            if num_bytes:
                os.posix_fallocate(file, 0, num_bytes)
        except BaseException:
            os.close(file)
            raise
    return file
