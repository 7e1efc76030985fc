"""Entry: one file of a cache, and how it is known to be whole."""

import contextlib
import os
import struct
import zlib

_HEADER = struct.Struct("<4sIQ")  # magic, checksum of name and content, length of the content, which follows
_MAGIC = b"aio1"

_FIRST_BYTES = 1 << 16
"""Asked for at once: so that a small file is read without its size being asked for, which takes another 1 us."""

_TRANSFER_MAX = 1 << 30  # Linux transfers 2 GiB in one call at most: read(2), NOTES

_BLOCK_BYTES = 4096


class DamagedEntryError(Exception):
    """A file holds something else than was put there: a writer was killed, or the disk has lost something."""


def size_on_disk(num_bytes: int) -> int:
    """Return what a file with so many bytes of content takes, in whole blocks."""
    return blocks_of(_HEADER.size + num_bytes)


def blocks_of(size: int) -> int:
    """Return what a file of this size takes, in whole blocks."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def read(path: str, name: str, *, touch: bool) -> bytes:
    """Return the content of an entry, in three system calls if it is small.

    Args:
        path: The file.
        name: What it must have been written for.
        touch: Whether to set its modification time, which says when it was used last.

    Raises:
        DamagedEntryError: It is not whole.
        OSError: It is not there, or cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # what is no file is not to hold us up
    try:
        first = os.pread(fd, _FIRST_BYTES, 0)
        if len(first) < _HEADER.size:
            raise DamagedEntryError(path)
        magic, checksum, length = _HEADER.unpack_from(first)
        if len(first) < _FIRST_BYTES:
            content = first[_HEADER.size :]
        elif os.fstat(fd).st_size == _HEADER.size + length:
            content = _read_from(fd, _HEADER.size, _HEADER.size + length)
        else:
            raise DamagedEntryError(path)
        if touch:
            _touch(fd)
    finally:
        os.close(fd)
    if magic == _MAGIC and length == len(content) and checksum == _checksum(name, content):
        return content
    raise DamagedEntryError(path)


def write(path: str, name: str, content: bytes) -> None:
    """Make a file of an entry; it is not there before, and is not there if this fails.

    Args:
        path: The file.
        name: What it is written for.
        content: What it is to hold.

    Raises:
        OSError: It cannot be written.
    """
    header = _HEADER.pack(_MAGIC, _checksum(name, content), len(content))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            rest = [memoryview(header), memoryview(content)]
            while rest:
                written = os.writev(fd, rest)
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]
        finally:
            os.close(fd)
    except BaseException:
        os.unlink(path)
        raise


def _checksum(name: str, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(name.encode()))


def _read_from(fd: int, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop and (piece := os.pread(fd, min(stop - start, _TRANSFER_MAX), start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _touch(fd: int) -> None:
    with contextlib.suppress(OSError):  # it may be read, and not written to
        os.utime(fd)
