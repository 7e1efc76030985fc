"""Abroad: errors that were raised in one process, for another one to raise."""

import contextlib
import os
import pickle
import traceback
from typing import Any

from aioload.errors import ErrorContext, SampleError, TransferError, error_context, text_of

_MOST_CAUSES = 8
_PICKLE = pickle.HIGHEST_PROTOCOL


def pack_error(exc: BaseException) -> bytes:
    """Return ``exc`` as bytes: its class, arguments, fields, notes, causes and, as text, its traceback.

    An exception need not be picklable. Fields that are not are replaced by their text, and a class that the other
    process could not find by the first of its bases that it can.
    """
    lines = "".join(traceback.format_exception(exc)).rstrip()
    return pickle.dumps((_parts_of(exc, _MOST_CAUSES), f"Raised in process {os.getpid()}:\n{lines}"), _PICKLE)


def unpack_error(packed: bytes) -> BaseException:
    """Return the error that :func:`pack_error` was given, without its traceback, which is a note."""
    parts, text = pickle.loads(packed)
    exc = _made_of(parts)
    with contextlib.suppress(Exception):
        object.__setattr__(exc, "__notes__", [*getattr(exc, "__notes__", ()), text])
    return exc


def pack_record(record: SampleError) -> tuple[Any, Any, str, bytes]:
    """Return the record of a sample that failed, to be pickled."""
    index, location, stage, error = record
    return _passable(index), _passable(location), stage, pack_error(error)


def unpack_record(packed: tuple[Any, Any, str, bytes]) -> SampleError:
    """Return the record that :func:`pack_record` was given."""
    index, location, stage, error = packed
    return SampleError(index, location, stage, unpack_error(error))


def pack_context(context: ErrorContext) -> tuple[Any, Any, str]:
    """Return where an error happened, to be pickled."""
    return _passable(context.index), _passable(context.location), context.stage


def _parts_of(exc: BaseException, num_causes: int) -> tuple[Any, ...]:
    context = error_context(exc)
    state = {name: _passable(value) for name, value in vars(exc).items() if value is not context}
    if context is not None:
        state["_aioload_context"] = ErrorContext(*pack_context(context))
    whole: bytes | tuple[type[BaseException], tuple[Any, ...]] | None = _if_whole(exc)
    if whole is None:
        kind = _findable(type(exc))
        args = exc.args if kind is type(exc) else (_text_of(exc),)
        whole = (kind, tuple(map(_passable, args)))
    around = [
        None if each is None or num_causes == 0 else _parts_of(each, num_causes - 1)
        for each in (exc.__cause__, exc.__context__)
    ]
    return whole, state, *around, exc.__suppress_context__


def _if_whole(exc: BaseException) -> bytes | None:
    """Return ``exc`` pickled its own way, if what comes of that is the same error."""
    try:
        packed = pickle.dumps(exc, _PICKLE)
        again = pickle.loads(packed)
        same = type(again) is type(exc) and text_of(again) == text_of(exc) and len(again.args) == len(exc.args)
    except BaseException:  # the exception's own code
        return None
    return packed if same else None


def _made_of(parts: tuple[Any, ...]) -> BaseException:
    whole, state, cause, context, suppress = parts
    if isinstance(whole, bytes):
        exc: BaseException = pickle.loads(whole)
    else:
        kind, args = whole
        exc = kind.__new__(kind, *args)
        exc.args = args
    for name, value in state.items():
        with contextlib.suppress(Exception):
            object.__setattr__(exc, name, value)
    if cause is not None:
        exc.__cause__ = _made_of(cause)
    if context is not None:
        exc.__context__ = exc.__cause__ if context == cause else _made_of(context)
    exc.__suppress_context__ = suppress
    return exc


def _text_of(exc: BaseException) -> str:
    try:
        return f"{type(exc).__qualname__}: {exc}"
    except Exception:  # its own code
        return text_of(exc)


def _findable(kind: type[BaseException]) -> type[BaseException]:
    for base in kind.__mro__:
        try:
            if issubclass(base, BaseException) and pickle.loads(pickle.dumps(base)) is base:
                return base
        except Exception:
            continue
    return TransferError


def _passable(value: Any) -> Any:
    """Return ``value``, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(value, _PICKLE))
    except Exception:
        return str(value)
    return value
