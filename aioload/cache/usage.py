"""Usage: how much of its space a folder's cache has used, on which all processes that use it agree."""

import contextlib
import fcntl
import math
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

_RECORD = struct.Struct("<4sQddd")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"aiou"


@dataclass(slots=True)
class Usage:
    """What is written down.

    Attributes:
        used_bytes: Of all entries, in whole blocks. It counts an entry before it is there, and until it is gone.
        full_since: When the cache last became nearly full (seconds since 1970), 0 if it is not: from then on the
            modification time of an entry says when it was used last.
        counted_at: When all entries were last counted.
        cleared_at: When they were last removed, 0 for never.
    """

    used_bytes: int = 0
    full_since: float = 0.0
    counted_at: float = 0.0
    cleared_at: float = 0.0


class UsageFile:
    """The record of one folder. Nothing is held open, so it may be used in any thread and after a fork.

    Args:
        path: The file.
        nearly_full_bytes: From how many used bytes on the cache counts as nearly full.
        count: Returns how many bytes all entries take, where no record says so.
    """

    def __init__(self, path: str, nearly_full_bytes: int, count: Callable[[], int]) -> None:
        self._path, self._nearly_full_bytes, self._count = path, nearly_full_bytes, count

    def look(self) -> Usage | None:
        """Return the record as it is at this moment, ``None`` if there is none."""
        try:
            with _opened(self._path, os.O_RDONLY) as fd:
                return _read(fd)
        except OSError:
            return None

    @contextlib.contextmanager
    def locked(self, *, recount_after_s: float = math.inf) -> Iterator[Usage]:
        """Lend the record while no other process or thread has it; what is changed in it is written down.

        Args:
            recount_after_s: All entries are counted if they have not been for so many seconds.

        Raises:
            OSError: It cannot be written, or the file system knows no locks.
        """
        with _opened(self._path, os.O_RDWR | os.O_CREAT) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)  # of this open file: it keeps other threads out too
            try:
                usage = _read(fd)
                if usage is None or time.time() - usage.counted_at > recount_after_s:
                    usage = replace(usage or Usage(), used_bytes=self._count(), counted_at=time.time())
                    self._write(fd, usage)
                before = replace(usage)
                yield usage
                if usage != before:
                    self._write(fd, usage)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a fork may have the file open as well

    def _write(self, fd: int, usage: Usage) -> None:
        if usage.used_bytes < self._nearly_full_bytes:
            usage.full_since = 0.0
        elif usage.full_since == 0:
            usage.full_since = time.time()
        os.pwrite(fd, _packed(usage), 0)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int) -> Usage | None:
    content = os.pread(fd, _RECORD.size + _CHECKSUM.size, 0)
    if len(content) < _RECORD.size + _CHECKSUM.size:
        return None
    magic, *values = _RECORD.unpack_from(content)
    usage = Usage(*values)
    return usage if magic == _MAGIC and content == _packed(usage) else None


def _packed(usage: Usage) -> bytes:
    record = _RECORD.pack(_MAGIC, usage.used_bytes, usage.full_since, usage.counted_at, usage.cleared_at)
    return record + _CHECKSUM.pack(zlib.crc32(record))
