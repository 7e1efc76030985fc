"""Answers: what a server's refusal means, as the error that the system has for the same thing."""

import email.utils
import errno
import http
import math
from typing import Any

_NUMBERS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    407: errno.EACCES,
    408: errno.ETIMEDOUT,
    410: errno.ENOENT,
    425: errno.EBUSY,
    429: errno.EBUSY,
    504: errno.ETIMEDOUT,
}
_SERVER_ERRORS = range(500, 600)


def error_of_status(status: int, location: Any, retry_after_s: float | None = None) -> OSError:
    """Return what to raise of a location that was answered with an HTTP status other than success.

    ``FileNotFoundError`` of 404 and 410, ``PermissionError`` of 401 and 403, ``TimeoutError`` of 408 and 504. These
    time-outs, 429 and all of 5xx are errors that pass; see :func:`~aioload.readers.policy.passes`.

    Args:
        status: The status.
        location: Becomes the error's ``filename``.
        retry_after_s: Becomes the error's, unless ``None``: for so many seconds the server wants to be left alone.
    """
    number = _NUMBERS.get(status, errno.EREMOTEIO if status in _SERVER_ERRORS else errno.EPROTO)
    try:
        phrase = f" {http.HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
    error = OSError(number, f"HTTP status {status}{phrase}", location)
    if retry_after_s is not None:
        error.retry_after_s = retry_after_s  # type: ignore[attr-defined]
    return error


def seconds_of_retry_after(value: str, now_s: float) -> float | None:
    """Return how many seconds a ``Retry-After`` header asks for, ``None`` if it is not understood.

    It is a number of seconds or a date: RFC 9110, section 10.2.3.

    Args:
        value: What follows ``Retry-After:``.
        now_s: The time, in seconds since 1970.
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
