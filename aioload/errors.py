"""Errors: what went wrong, whose fault it was, and where.

What user code raises is never wrapped: the very object reaches the caller with one note added, and
:func:`error_context` reads the same facts back. What the loader itself finds wrong is an
:class:`AioloadError` that is also the builtin a caller would expect.
"""

import contextlib
from typing import Any, NamedTuple

_CONTEXT = "_aioload_context"
_NOTE_PREFIX = "aioload: "


class ErrorContext(NamedTuple):
    """Where an error happened.

    Attributes:
        index: The sample's index as the sampler gave it; a list of indices when the whole batch failed
            (``collate_fn``, ``__getitems__``); ``None`` when no sample was involved (sampler).
        location: The path or URL of the sample, or ``None`` when the dataset has no ``location``.
        stage: ``"read"``, ``"decode"``, ``"fetch"`` (``__getitem__`` and its kin), ``"collate"``,
            ``"copy"``, ``"sampler"`` or ``"worker_init_fn"``.
    """

    index: Any
    location: Any
    stage: str

    def describe(self) -> str:
        """Return the one-line note that is added to the exception."""
        parts = [f"stage {self.stage!r}"]
        if self.index is not None:
            parts.append(f"indices {_shorten(self.index)}" if isinstance(self.index, list) else f"index {self.index!r}")
        if self.location is not None:
            parts.append(f"location {str(self.location)!r}")
        return _NOTE_PREFIX + "failed at " + ", ".join(parts)


class AioloadError(Exception):
    """Base of everything the loader itself finds wrong."""


class ArgumentError(AioloadError, ValueError):
    """An argument of the user's has a value that cannot work."""


class DatasetError(AioloadError, TypeError):
    """A dataset does not follow any protocol the loader knows, or broke the one it declared."""


class CollateError(AioloadError, RuntimeError):
    """Samples of one batch cannot be stacked; the message names the two samples and how they differ."""


class SampleTypeError(AioloadError, TypeError):
    """A sample holds a value that cannot be put into a batch; the message names the sample and the field."""


class LoaderTimeoutError(AioloadError, RuntimeError, TimeoutError):
    """A batch took longer than ``timeout`` seconds; the message names the samples still missing."""


class LoaderClosedError(AioloadError, RuntimeError):
    """The loader or iterator was closed while, or before, a batch was asked for."""


class ForkedIteratorError(AioloadError, RuntimeError):
    """An iterator made before ``fork`` was used in the child, where its threads do not exist."""


class StoppedIterationError(AioloadError, RuntimeError):
    """User code raised ``StopIteration``, which would have ended the loop without a word; it is the cause."""


class EngineError(AioloadError, RuntimeError):
    """The loader's own machinery failed; the cause says how. Please report it."""


class DatasetNotFoundError(AioloadError, FileNotFoundError):
    """A folder does not hold the files a dataset is made of; the message says what was found instead."""


def error_context(exc: BaseException) -> ErrorContext | None:
    """Return where in the data the exception came from, or ``None`` when it did not come through a loader.

    Args:
        exc: An exception caught around ``for``, ``async for`` or ``next``.
    """
    context = getattr(exc, _CONTEXT, None)
    return context if isinstance(context, ErrorContext) else None


def annotate(exc: BaseException, context: ErrorContext) -> None:
    """Put ``context`` on ``exc``, as an attribute and as a note, in place of an earlier one of ours.

    An exception object that user code raises twice (a cached one) carries the context of its last delivery.
    An exception that refuses attributes keeps its class and fields and goes without.
    """
    with contextlib.suppress(Exception):
        notes = getattr(exc, "__notes__", None)
        if notes:
            notes[:] = [note for note in notes if not str(note).startswith(_NOTE_PREFIX)]
        exc.add_note(context.describe())
        setattr(exc, _CONTEXT, context)


def safe_to_raise(exc: BaseException) -> BaseException:
    """Return ``exc``, or in place of a ``StopIteration``, which would end the caller's loop, an error of ours."""
    if not isinstance(exc, StopIteration | StopAsyncIteration):
        return exc
    error = StoppedIterationError(f"User code raised {exc!r}, which would have ended the loop in silence.")
    error.__cause__ = exc
    return error


def _shorten(indices: list[Any]) -> str:
    if len(indices) <= 8:
        return repr(indices)
    return f"[{', '.join(map(repr, indices[:6]))}, ... {len(indices) - 6} more]"
