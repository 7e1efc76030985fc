"""Parcel: what an engine process is given when it begins: dataset and settings, pickled once for each process."""

import io
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import torch

from aioload.errors import TransferError, text_of

_MOST_DEPTH = 6


class Parcel:
    """Things by name, as attributes, that travel with a process that is started.

    Args:
        **contents: The things.
    """

    def __init__(self, **contents: Any) -> None:
        self.contents = contents
        self.error: BaseException | None = None
        """In the process that got it: why the contents could not be unpacked."""

    def __reduce__(self) -> Any:
        """Pickle, in the course of the start of a process: only then do locks and shared values let it be done.

        Raises:
            TransferError: Something cannot be pickled; the message says which part of what.
        """
        try:
            return _unpack, (_pickled(self.contents),)
        except Exception as exc:
            name, part, inner = unpicklable_part(self.contents, exc)
            message = (
                f"{name} cannot be given to an engine process, since it cannot be pickled: {text_of(inner)}. Leave "
                f"{type(part).__name__} objects out of what is pickled (by a __getstate__ of its owner) and make them "
                "where they are used first; define functions and classes at the top level of a module; or leave out "
                "processes=, which needs nothing pickled."
            )
            raise TransferError(message) from exc


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(reduction.ForkingPickler):
    """Knows what is registered with multiprocessing (locks, pipes, shared values), save for torch's tensors.

    torch would move these into shared memory, a file each, which is a limit for lists of many and needs ``/dev/shm``.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            is_private = not obj._untyped_storage.is_shared()  # noqa: SLF001  # its own is_shared() warns
        else:
            is_private = isinstance(obj, torch.Tensor | torch.UntypedStorage) and not obj.is_shared()
        return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if is_private else NotImplemented


def _unpack(pickled: bytes) -> Parcel:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on, which may take long: Ctrl-C is for the consumer
    parcel = Parcel()
    try:
        parcel.contents = pickle.loads(pickled)
    except BaseException as exc:
        parcel.error = exc
    return parcel


def unpicklable_part(contents: Mapping[str, Any], exc: Exception) -> tuple[str, Any, Exception]:
    """Return the path to the innermost part that cannot be pickled, that part, and what pickling it alone raises."""
    for name, value in contents.items():
        inner = _error_of(value)
        if inner is not None:
            return _search(name, value, inner, _MOST_DEPTH)
    return " and ".join(contents), contents, exc


def _search(path: str, value: Any, exc: Exception, depth: int) -> tuple[str, Any, Exception]:
    if depth:
        for suffix, part in _parts_of(value):
            inner = _error_of(part)
            if inner is not None:
                return _search(path + suffix, part, inner, depth - 1)
    return path, value, exc


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, item in enumerate(value):
            yield f"[{number}]", item
    state = getattr(value, "__dict__", None)
    if isinstance(state, Mapping):
        for name, item in state.items():
            yield f".{name}", item


def _error_of(value: Any) -> Exception | None:
    try:
        _pickled(value)
    except Exception as exc:
        return exc
    return None
