"""Objects: what lies in object stores and behind HTTP, by the ``obstore`` package."""

import errno
import os
import re
from collections.abc import Mapping
from typing import Any

from aioload.errors import ArgumentError, ForkedReaderError, MissingExtraError
from aioload.readers.aiofiles import AiofilesReader
from aioload.readers.answers import error_of_status
from aioload.readers.base import Range, checked_range
from aioload.readers.kept import Kept
from aioload.readers.local import LocalReader
from aioload.readers.urls import is_url, local_path, place_of, scheme_of
from aioload.types import Location

_EXTRA = "obstore"
_NO_RETRIES = {"max_retries": 0}  # obstore's own would not be counted, and keep no Retry-After
_MAX_STOP = (1 << 63) - 1  # servers take no more for a position

# obstore tells the status, and what became of the connection, in its message alone. Spaces are escaped in the URL
# that stands before, so no URL looks like this.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_TROUBLE = re.compile(r"HttpError \{\s*kind: (\w+)")
_LOST = frozenset(("Connect", "Request", "Interrupted", "Decode"))

# Names that obstore takes for where a store is.
_ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "azure_endpoint")

_stores = Kept[Any]()
_first_user: list[int] = []  # the process that has started obstore's threads


class ObjectStoreReader:
    """Reads ``s3://``, ``gs://``, ``az://``, ``http://``, ``https://`` and ``memory://`` in coroutines, and files.

    Needs the extra ``aioload[obstore]``. One client, with its connections, is kept for each bucket or server, as long
    as the reader; there is nothing to close. Any number of threads and event loops may use one. A copy has clients of
    its own. What is no URL, or begins with ``file://``, is read as :class:`~aioload.readers.AiofilesReader` does.

    Keys are taken as they are: nothing in ``s3://bucket/a%20b`` is unescaped. URLs of HTTP are sent as they are; those
    with a query need a client, and a connection, each.

    A failed request is not repeated by obstore, unless ``retry_config`` says so, but by the loader; see
    :class:`~aioload.readers.ReadPolicy`. obstore does not pass on how long a server wants to be left alone
    (``Retry-After``). Of HTTP servers it needs the length of an object (``Content-Length``), and what they send
    compressed (``Content-Encoding``) is given as it was sent; :class:`~aioload.readers.FsspecReader` can do without.

    obstore does not work in a process that was forked off one in which it had read before; see
    :class:`~aioload.errors.ForkedReaderError`.

    Args:
        stores: Stores of obstore's, by the URL that they are the root of: ``{"s3://bucket": S3Store(...)}``, or
            ``{"memory://": MemoryStore()}``, which there is no other way to read from. Others are made when needed.
        client_options: obstore's ``ClientConfig``, for all stores that the reader makes: time-outs, a proxy,
            ``allow_http``. (The last is implied for ``http://`` URLs, and by an ``endpoint`` that is one.)
        retry_config: obstore's ``RetryConfig``, for all stores that the reader makes.
        **config: What else :func:`obstore.store.from_url` takes for the stores that are no HTTP servers: ``endpoint``,
            ``region``, ``access_key_id``, ``skip_signature``, ``credential_provider`` and so on.
    """

    def __init__(
        self,
        *,
        stores: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        retry_config: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self._given = {_root(url): store for url, store in (stores or {}).items()}
        self._client_options = dict(client_options or {})
        self._retry_config = dict(_NO_RETRIES if retry_config is None else retry_config)
        self._config = config
        if any(str(config.get(name)).startswith("http://") for name in _ENDPOINTS):
            self._client_options = {"allow_http": True, **self._client_options}

    def __deepcopy__(self, _: dict[int, Any]) -> "ObjectStoreReader":
        """Return a reader with clients of its own, and the same ``stores``: what they hold is not copied."""
        other = ObjectStoreReader.__new__(ObjectStoreReader)
        other.__dict__.update(self.__dict__)
        return other

    async def read(self, location: Location, offset: int = 0, length: int | None = None) -> bytes:
        """Read an object, or ``length`` bytes of it from ``offset`` on.

        Args:
            location: The object's URL, or a file's path.
            offset: The first byte wanted.
            length: Number of bytes wanted, ``None`` for all that follow; past the end, it gives what there is.

        Returns:
            The bytes, owned by the caller.

        Raises:
            ArgumentError: ``offset`` or ``length`` is negative, or no whole number.
            FileNotFoundError: There is no such object, or no such bucket.
            IsADirectoryError: The URL names a bucket, or ends in a slash.
            PermissionError: It may not be read, or not without other credentials.
            OSError: It cannot be read for another reason, as :func:`~aioload.readers.answers.error_of_status` says.
                Lost connections are ``ConnectionError``. Of all of these ``filename`` is the location, and
                ``__cause__`` obstore's own exception.
            ValueError: The URL, or an option, is none that obstore takes.
            MissingExtraError: obstore is not installed.
            ForkedReaderError: obstore does not work in this process.
        """
        wanted = checked_range(offset, length)
        if (path := _file_path(location)) is not None:
            return await _awaited_files.read(path, offset, length)
        kinds = _kinds_of_errors(location)
        store, key = self._find(str(location))
        try:
            if wanted.is_whole:
                return bytes(await (await store.get_async(key)).bytes_async())
            return await _read_part_async(store, key, wanted)
        except kinds as exc:
            raise _translated(exc, location) from exc

    def read_blocking(self, location: Location, offset: int = 0, length: int | None = None) -> bytes:
        """As :meth:`read`, in a call that blocks, without the interpreter lock. Costs half of what awaiting it does."""
        wanted = checked_range(offset, length)
        if (path := _file_path(location)) is not None:
            return _blocking_files.read(path, offset, length)
        kinds = _kinds_of_errors(location)
        store, key = self._find(str(location))
        try:
            if wanted.is_whole:
                return bytes(store.get(key).bytes())
            return _read_part(store, key, wanted)
        except kinds as exc:
            raise _translated(exc, location) from exc

    def _find(self, url: str) -> tuple[Any, str]:
        place = place_of(url)
        if place.store in self._given:
            return self._given[place.store], place.key
        if not place.key:  # a URL that is a store by itself is not met again
            return self._make(place.store), ""
        return _stores.get(self, place.store, lambda: self._make(place.store)), place.key

    def _make(self, root: str) -> Any:
        import obstore.store

        from_url: Any = obstore.store.from_url
        http_store: Any = obstore.store.HTTPStore
        options, retries = self._client_options, self._retry_config
        if root == "memory://":
            message = "memory:// is read from a store that is given to the reader: stores={'memory://': MemoryStore()}"
            raise ArgumentError(message)
        if not root.startswith(("http://", "https://")):
            return from_url(root, client_options=options or None, retry_config=retries, **self._config)
        if root.startswith("http://"):
            options = {"allow_http": True, **options}
        # Not from_url: it takes a server of Amazon's or Microsoft's for a store of another kind.
        return http_store(root, client_options=options or None, retry_config=retries)


_awaited_files, _blocking_files = AiofilesReader(), LocalReader()


def _root(url: str) -> str:
    if not is_url(url):
        message = f"stores must be given by URLs such as 's3://bucket', got {url!r}"
        raise ArgumentError(message)
    return "memory://" if scheme_of(url) == "memory" else place_of(f"{url.rstrip('/')}/key").store


def _file_path(location: Location) -> Location | None:
    if not is_url(location):
        return location
    return local_path(location) if scheme_of(location) == "file" else None


def _kinds_of_errors(location: Location) -> tuple[type[Exception], ...]:
    """Return what obstore raises; it is imported here, and only where it works."""
    try:
        import obstore.exceptions
    except ImportError as exc:
        raise MissingExtraError.of(_EXTRA, location) from exc
    if not _first_user:
        _first_user.append(os.getpid())
    elif _first_user[0] != os.getpid():
        message = (
            f"{location!r} cannot be read by obstore in a process that was forked off one which had used obstore "
            "before: its threads are not here. Start processes by 'spawn' or 'forkserver', or read by FsspecReader."
        )
        raise ForkedReaderError(message)
    return FileNotFoundError, obstore.exceptions.BaseError


def _options(wanted: Range) -> Any:
    start = min(wanted.offset, _MAX_STOP - 1)
    if wanted.length is None:
        return {"range": {"offset": start}}
    # No request is for no bytes. What becomes of one for the byte behind is the same, and is cut off.
    return {"range": (start, min(start + max(1, wanted.length), _MAX_STOP))}


def _read_part(store: Any, key: str, wanted: Range) -> bytes:
    from obstore.exceptions import GenericError, NotSupportedError

    try:
        return bytes(store.get(key, options=_options(wanted)).bytes())[: wanted.length]
    except NotSupportedError:  # the server knows no ranges
        return wanted.of(bytes(store.get(key).bytes()))
    except GenericError as exc:
        if _may_be_past_the_end(exc) and store.head(key)["size"] <= wanted.offset:
            return b""
        raise


async def _read_part_async(store: Any, key: str, wanted: Range) -> bytes:
    from obstore.exceptions import GenericError, NotSupportedError

    try:
        result = await store.get_async(key, options=_options(wanted))
        return bytes(await result.bytes_async())[: wanted.length]
    except NotSupportedError:
        return wanted.of(bytes(await (await store.get_async(key)).bytes_async()))
    except GenericError as exc:
        if _may_be_past_the_end(exc) and (await store.head_async(key))["size"] <= wanted.offset:
            return b""
        raise


def _may_be_past_the_end(exc: Exception) -> bool:
    """Whether it says that a range cannot be had: a server by its status, a store in memory in its own words."""
    status = _STATUS.search(str(exc))
    return int(status[1]) == 416 if status else _TROUBLE.search(str(exc)) is None


def _translated(exc: Exception, location: Location) -> OSError:
    """Return the system's error for one of obstore's."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    name: Any = location
    if isinstance(exc, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "No such object", name)
    if isinstance(exc, PermissionDeniedError | UnauthenticatedError):
        return PermissionError(errno.EACCES, "Permission denied", name)
    text = str(exc)
    if status := _STATUS.search(text):
        return error_of_status(int(status[1]), name)
    trouble = _TROUBLE.search(text)
    if trouble and trouble[1] == "Timeout":
        return TimeoutError(errno.ETIMEDOUT, "The request timed out", name)
    summary = text.partition("\n")[0]
    if trouble and trouble[1] in _LOST:
        return ConnectionError(errno.ECONNABORTED, summary, name)
    return OSError(errno.EPROTO, summary, name)
