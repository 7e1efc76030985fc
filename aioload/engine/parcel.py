"""Parcel: what an engine process is given when it begins: dataset and settings.

Arrays and tensors of theirs are there once for all processes (:mod:`~aioload.engine.buffers`), the rest in each.
"""

import contextlib
import dataclasses
import io
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen
from typing import Any, Protocol

import torch

from aioload.datasets.compact import reduce_compact
from aioload.engine.buffers import Buffers, buffers_in
from aioload.engine.packing import reduce_plain
from aioload.engine.segments import map_file, new_file
from aioload.errors import TransferError, text_of
from aioload.structure import is_plain

_MOST_DEPTH = 6


class Parcel:
    """Things by name that travel to processes: pickled once for all, in files that are passed on behind their start.

    What can only be pickled in the course of the start of a process, and goes there another way, has the parcel
    pickled anew with each; so it is also where nothing needs to be pickled, as the process is a fork.

    Args:
        contents: The things.
        is_for_forks: Whether all processes are forks of this one.

    Raises:
        TransferError: Something cannot be pickled; the message says which part of what.
        OSError: There is no memory for it.
    """

    def __init__(self, contents: dict[str, Any], *, is_for_forks: bool) -> None:
        self.contents = contents
        self.error: BaseException | None = None
        """In the process that got it: why the contents could not be unpacked."""
        self.files: list[int] = []
        """Where they are, until :meth:`close`: the pickle, and the buffers beside it, if there are any."""
        if not is_for_forks:
            with contextlib.suppress(_OnlyWithProcessError):
                self.files = _written(contents)

    @property
    def file(self) -> int | None:
        """The first of the files, ``None`` if there are none."""
        return self.files[0] if self.files else None

    def wrapping(self) -> "Parcel":
        """Return what a process is started with, whatever the contents are sent by."""
        return self if self.file is None else Parcel({}, is_for_forks=True)

    def close(self) -> None:
        """Close the files: they have been given to all."""
        while self.files:
            os.close(self.files.pop())

    def __reduce__(self) -> Any:
        """Pickle, in the course of the start of a process.

        Raises:
            TransferError: Something cannot be pickled; the message says which part of what.
        """
        if not self.contents:
            return _unpack, (None,)
        stream = io.BytesIO()
        _dump_or_error(self.contents, stream)
        return _unpack, (stream.getvalue(),)

    def unpack(self, file: int, beside: int | None = None) -> None:
        """Fill it with the contents of files, which are closed. In the process that got it."""
        try:
            buffers = () if beside is None else buffers_in(beside)
            self.contents = pickle.loads(map_file(file), buffers=buffers)
        except BaseException as exc:
            self.error = exc


class _OnlyWithProcessError(Exception):
    pass


class _Nobody:
    """In place of a process that is started, for what is passed to any: names may be, and open files may not."""

    def DupFd(self, _: int) -> Any:
        raise _OnlyWithProcessError

    duplicate_for_child = DupFd


class _Sink(Protocol):
    def write(self, data: Any, /) -> int: ...


class _File:
    """A file to be pickled into, of which one can tell that it could not be written to."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        done = 0
        try:
            with memoryview(data).cast("B") as view:
                while done < len(view):
                    done += os.write(self._file, view[done:])
        except OSError as exc:
            self.error = exc
            raise
        return done


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _written(contents: dict[str, Any]) -> list[int]:
    buffers, files = Buffers(), [new_file(0)]
    set_spawning_popen(_Nobody())  # type: ignore[arg-type]
    try:
        _dump_or_error(contents, _File(files[0]), buffers)
        beside = buffers.written()
    except BaseException:
        os.close(files[0])
        raise
    finally:
        set_spawning_popen(None)
    return files if beside is None else [*files, beside]


def _dump_or_error(contents: dict[str, Any], sink: _Sink, buffers: Buffers | None = None) -> None:
    try:
        _dump(contents, sink, buffers)
    except _OnlyWithProcessError:
        raise
    except Exception as exc:
        if isinstance(sink, _File) and exc is sink.error:
            raise
        name, part, inner = unpicklable_part(contents, exc)
        name = name.removeprefix("settings.")  # the loader's own arguments
        message = (
            f"{name} cannot be given to an engine process, since it cannot be pickled: {text_of(inner)}. Leave "
            f"{type(part).__name__} objects out of what is pickled (by a __getstate__ of its owner) and make them "
            "where they are used first; define functions and classes at the top level of a module; or leave out "
            "processes=, which needs nothing pickled."
        )
        raise TransferError(message) from exc


def _dump(value: Any, sink: _Sink, buffers: Buffers | None = None) -> None:
    _Pickler(sink, pickle.HIGHEST_PROTOCOL, True, buffers).dump(value)


class _Pickler(reduction.ForkingPickler):
    """Knows what is registered with multiprocessing (locks, pipes, shared values), save for torch's tensors.

    torch would move these into shared memory, a file each, which is a limit for lists of many and needs ``/dev/shm``.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            is_private = not obj._untyped_storage.is_shared()  # noqa: SLF001  # its own is_shared() warns
        else:
            has_parts = isinstance(obj, torch.Tensor) and obj.layout is not torch.strided  # and no storage of its own
            is_private = has_parts or (isinstance(obj, torch.Tensor | torch.UntypedStorage) and not obj.is_shared())
        if not is_private:
            compact = reduce_compact(obj, pickle.HIGHEST_PROTOCOL)
            return NotImplemented if compact is None else compact
        if isinstance(obj, torch.Tensor) and is_plain(obj):
            reduced = reduce_plain(obj, copies=False)  # a copy might be larger by far: of one that was expanded, say
            if reduced is not None:
                return reduced
        return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _unpack(pickled: bytes | None) -> Parcel:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on, which may take long: Ctrl-C is for the consumer
    parcel = Parcel({}, is_for_forks=True)
    if pickled is not None:
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
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # with slots
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name)


def _error_of(value: Any) -> Exception | None:
    try:
        _dump(value, _Nowhere(), Buffers())
    except Exception as exc:
        return exc
    return None
