"""URLs: which locations are one, and where in it the store ends and the name of the object begins."""

import errno
import os
import re
import urllib.parse
from typing import Any, NamedTuple, TypeGuard

_UNCHANGED = "/!$&'()*+,-.:;=@[]^_|~"  # in a path, besides letters and digits: what the WHATWG URL standard leaves
_LOCAL_HOSTS = ("", "localhost")


def is_url(location: Any) -> TypeGuard[str]:
    """Whether it is text with ``://`` in it; anything else is a path."""
    return isinstance(location, str) and "://" in location


def scheme_of(url: str) -> str:
    """Return what stands before ``://``, in lower case."""
    return url.partition("://")[0].lower()


def local_path(url: str) -> str:
    """Return the path that a ``file://`` URL is of.

    Raises:
        ValueError: It is of another machine.
    """
    host, slash, rest = url.partition("://")[2].partition("/")
    if host.lower() not in _LOCAL_HOSTS:
        message = f"A file:// URL must be of this machine, as file:///path is; got {url!r}"
        raise ValueError(message)
    return os.fsdecode(urllib.parse.unquote_to_bytes(slash + rest))


class Place(NamedTuple):
    """Where an object is: the URL of its store, and its key in there, as it is: nothing is escaped."""

    store: str
    key: str


def place_of(url: str) -> Place:
    """Return the place of an object.

    Of ``http://`` and ``https://`` the store is the server. A URL that cannot be put together again from server and
    key, as one with a query, is a store by itself, with an empty key. Everywhere else, the store is what is before the
    first slash, a bucket or a container.

    Raises:
        IsADirectoryError: It names a bucket, or ends in a slash.
        ValueError: The key has an empty part, or one of dots: such objects cannot be asked for.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme == "memory":
        store, key = "memory://", rest.removeprefix("/")
    else:
        host, _, key = rest.partition("/")
        store = f"{scheme}://{host}"
    if scheme in ("http", "https"):
        return _place_of_http(store, key.partition("#")[0])
    if not key or key.endswith("/"):
        raise IsADirectoryError(errno.EISDIR, "It names no object", url)
    if re.search(r"(^|/)(\.{0,2})(/|$)", key):
        message = f"An object's key must be parts with single slashes between, and none of dots alone; got {url!r}"
        raise ValueError(message)
    return Place(store, key)


def _place_of_http(server: str, path: str) -> Place:
    key = urllib.parse.unquote(path)
    is_plain = "%" not in path or urllib.parse.quote(key, _UNCHANGED) == path
    if not is_plain or "?" in path or re.search(r"(^|/)(\.{0,2})(/|$)", key):
        return Place(f"{server}/{path}", "")
    return Place(server, key)
