"""The local file system, mounts included: one file, whole, in four system calls."""

import io
import os

from aioload.types import Location

_FLAGS = os.O_RDONLY | os.O_CLOEXEC

# Linux transfers no more than this in one call: read(2), NOTES.
_READ_MAX = 0x7FFFF000


def read_file(path: Location) -> bytes:
    """Read a whole file.

    A file that shrinks meanwhile gives what is left of it. Pipes and devices are read to their end, and so
    are files that report no size (``/proc``). The call blocks; the GIL is released while the kernel works.
    Any number of threads may read at once, the same file included.

    Args:
        path: The file's path.

    Returns:
        The file's content, owned by the caller.

    Raises:
        OSError: The file cannot be opened or read: FileNotFoundError, PermissionError, IsADirectoryError and
            so on, always with the path in ``filename``.
    """
    # 4 KB from page cache: 7.0 us; with fstat for the size 8 - 9 us; open(path, "rb").read() 12 - 15 us.
    try:
        fd = os.open(path, _FLAGS)
        try:
            try:
                size = os.lseek(fd, 0, os.SEEK_END)
            except OSError:  # a pipe or a device; on tmpfs also a directory
                size = 0
            if 0 < size <= _READ_MAX:  # ext4 reports 2**63 - 1 for a directory
                data = os.pread(fd, size, 0)
                if len(data) == size:
                    return data
            return _read_to_end(fd)
        finally:
            os.close(fd)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def _read_to_end(fd: int) -> bytes:
    """Read from the start until the end shows, whatever size was reported; leave ``fd`` open."""
    with io.FileIO(fd, closefd=False) as file:  # refuses directories
        if file.seekable():
            file.seek(0)
        return file.readall()
