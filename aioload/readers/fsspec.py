"""Fsspec: everything that the ``fsspec`` package knows a file system for."""

import errno
import os
import sys
import time
from typing import Any

from aioload.errors import MissingExtraError
from aioload.readers.answers import error_of_status, seconds_of_retry_after
from aioload.readers.base import Range, checked_range
from aioload.readers.kept import Kept
from aioload.types import Location

_EXTRA = "fsspec"

# fsspec raises these with no more than a path, or nothing.
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
}

# What they raise when a connection is refused or breaks off.
_LOST = {
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "botocore.exceptions": ("ConnectionError", "HTTPClientError"),
    "requests.exceptions": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "httpx": ("TransportError",),
}

_file_systems = Kept[Any]()


class FsspecReader:
    """Reads whatever fsspec opens: ``hf://``, ``sftp://``, ``hdfs://``, ``zip://...::s3://...`` and so on.

    Needs the extra ``aioload[fsspec]``, and the package behind the protocol (s3fs, sshfs, ...), as fsspec says. Calls
    block, without the interpreter lock where the file system has a loop of its own, as those of HTTP and S3 do.
    Each file system is made once, and fsspec itself keeps it, with its connections, as long as the process; there is
    nothing to close. Any number of threads may use one reader, if the file system bears it; those of fsspec do.

    Args:
        **storage_options: What fsspec's ``storage_options`` are elsewhere, for all file systems.
    """

    def __init__(self, **storage_options: Any) -> None:
        self._storage_options = storage_options

    def read(self, location: Location, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or ``length`` bytes of it from ``offset`` on.

        Args:
            location: The file's URL, or a path.
            offset: The first byte wanted.
            length: Number of bytes wanted, ``None`` for all that follow; past the end, it gives what there is.

        Returns:
            The bytes, owned by the caller.

        Raises:
            ArgumentError: ``offset`` or ``length`` is negative, or no whole number.
            OSError: FileNotFoundError, PermissionError and so on. ``filename`` is the location. What HTTP answers is
                translated as :func:`~aioload.readers.answers.error_of_status` does, with what ``Retry-After`` asks for.
            ImportError: The package behind the protocol is not installed.
            MissingExtraError: fsspec is not installed.
            Exception: What else the file system raises.
        """
        wanted = checked_range(offset, length)
        file_system, path = self._find(location)
        try:
            if wanted.is_whole:
                return bytes(file_system.cat_file(path))
            return _read_part(file_system, path, wanted)
        except Exception as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                exc.filename = location
                raise
            if _status_of(exc) is None and not isinstance(exc, (OSError, *_kinds_of_lost_connections())):
                raise
            raise _translated(exc, location) from exc

    def _find(self, location: Location) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError as exc:
            raise MissingExtraError.of(_EXTRA, location) from exc
        url = os.fspath(location)
        if isinstance(url, bytes):
            url = os.fsdecode(url)
        scheme, mark, rest = url.partition("://")
        if not mark or "::" in url:
            file_system, path = url_to_fs(url, **self._storage_options)  # which keeps file systems too
            return file_system, path
        root = scheme + mark + rest.partition("/")[0]
        kept = _file_systems.get(self, root, lambda: url_to_fs(url, **self._storage_options)[0])
        return kept, kept._strip_protocol(url)  # noqa: SLF001  # there is no other name for it; fsspec's own use it


def _read_part(file_system: Any, path: str, wanted: Range) -> bytes:
    stop = None if wanted.length is None else wanted.offset + wanted.length
    try:
        if stop is None or stop > wanted.offset:
            return bytes(file_system.cat_file(path, start=wanted.offset, end=stop))
    except Exception:  # past the end, some fail, and some as well when the range only ends there
        size = file_system.size(path)
        if size is None or (stop is not None and stop <= size) or (stop is None and wanted.offset < size):
            raise
        if wanted.offset >= size:
            return b""
        return bytes(file_system.cat_file(path, start=wanted.offset, end=size))
    file_system.info(path)  # no bytes of what is there are none, but of what is not, an error
    return b""


def _status_of(exc: Exception) -> int | None:
    """Return the HTTP status that an exception is about, as aiohttp, gcsfs, requests and httpx have it in theirs."""
    for holder in (exc, getattr(exc, "response", None)):
        for name in ("status", "status_code", "code"):
            status = getattr(holder, name, None)
            if type(status) is int and 400 <= status < 600:
                return status
    return None


def _headers_of(exc: Exception) -> Any:
    return getattr(exc, "headers", None) or getattr(getattr(exc, "response", None), "headers", None) or {}


def _kinds_of_lost_connections() -> tuple[type[Exception], ...]:
    """Return those of the packages that are in use."""
    modules = ((sys.modules.get(module), names) for module, names in _LOST.items())
    return tuple(getattr(module, name) for module, names in modules if module for name in names)


def _translated(exc: Any, location: Any) -> OSError:
    """Return the system's error for an answer, a lost connection, or an error of its kind without a number."""
    if (status := _status_of(exc)) is not None:
        header = _headers_of(exc).get("Retry-After")
        return error_of_status(status, location, header and seconds_of_retry_after(header, time.time()))
    for kind, number in _NUMBERS.items():
        if isinstance(exc, kind):
            return OSError(number, os.strerror(number), location)
    if isinstance(exc, _kinds_of_lost_connections()):
        return ConnectionError(errno.ECONNABORTED, str(exc) or type(exc).__name__, location)
    return OSError(errno.EPROTO, str(exc) or type(exc).__name__, location)
