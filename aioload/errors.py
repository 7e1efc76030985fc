"""Errors: what went wrong, whose fault it was, and where.

What user code raises is never wrapped: the very object reaches the caller with one note added, and
:func:`error_context` reads the same facts back. What the loader itself finds wrong is an
:class:`AioloadError` that is also the builtin a caller would expect.
"""

import contextlib
import errno
import threading
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
            ``"copy"``, ``"device_transform"``, ``"sampler"`` or ``"worker_init_fn"``.
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


class SampleError(NamedTuple):
    """A sample that could not be loaded, where that does not end the loop; see ``on_error`` of the loader.

    Attributes:
        index: Its index as the sampler gave it.
        location: Its path or URL, or ``None`` when the dataset has no ``location``.
        stage: ``"read"``, ``"decode"`` or ``"fetch"`` (``__getitem__``).
        error: What was raised. Its traceback has the lines; the variables are gone.
    """

    index: Any
    location: Any
    stage: str
    error: BaseException


class AioloadError(Exception):
    """Base of everything the loader itself finds wrong."""


class ArgumentError(AioloadError, ValueError):
    """An argument of the user's has a value that cannot work."""


class DatasetError(AioloadError, TypeError):
    """A dataset or reader does not follow any protocol the loader knows, or broke the one it declared."""


class CollateError(AioloadError, RuntimeError):
    """Samples of one batch cannot be stacked; the message names the two samples and how they differ."""


class SampleTypeError(AioloadError, TypeError):
    """A sample holds a value that cannot be put into a batch; the message names the sample and the field."""


class SampleValueError(AioloadError, ValueError):
    """A sample holds a value of a known type that cannot be put into a batch; the message names sample and field."""


class SampleKeyError(AioloadError, KeyError):
    """One sample of a batch lacks a field that another has; the message names both samples and the field."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message in quotes


class TooManyErrorsError(AioloadError, RuntimeError):
    """More samples failed than ``max_errors`` allows, or all of them; the last one's error is the cause."""


class LoaderTimeoutError(AioloadError, RuntimeError, TimeoutError):
    """A batch took longer than ``timeout`` seconds; the message names the samples still missing.

    Of a batch that another process makes it names those that are being loaded there.
    """


class ReadTimeoutError(AioloadError, TimeoutError):
    """A read took longer than ``timeout_s`` of the policy; it has been given up, though its thread may be stuck."""


class LoaderClosedError(AioloadError, RuntimeError):
    """The loader or iterator was closed while, or before, a batch was asked for."""


class RunningLoopError(AioloadError, RuntimeError):
    """What was asked for has to run an event loop in a thread where one is running already."""


class ForkedIteratorError(AioloadError, RuntimeError):
    """An iterator made before ``fork`` was used in the child, where its threads do not exist."""


class ForkedReaderError(AioloadError, RuntimeError):
    """A reader cannot work in this process, which was forked off one in which it had; the message says what can."""


class MissingExtraError(AioloadError, ImportError):
    """A package that reads this kind of location is not installed; the message names the extra that brings it."""

    @classmethod
    def of(cls, extra: str, location: Any) -> "MissingExtraError":
        """Return the error for a location that the package ``extra``, in the extra of that name, would read."""
        return cls(
            f"{location!r} is read by the package {extra}, which is not installed: pip install 'aioload[{extra}]'"
        )


class StoppedIterationError(AioloadError, RuntimeError):
    """User code raised ``StopIteration``, which would have ended the loop without a word; it is the cause."""


class EngineError(AioloadError, RuntimeError):
    """The loader's own machinery failed; the cause says how. Please report it."""


class ProcessDiedError(AioloadError, RuntimeError):
    """An engine process ended by itself, as when it was killed; the message says by what and what it was loading."""


class TransferError(AioloadError, TypeError):
    """Something cannot be pickled that must go to an engine process, or come from one; the message says what."""


class NoSampleError(AioloadError, RuntimeError):
    """``sample_rng()`` was called where no sample is known; the message says what to do."""


class StateError(AioloadError, ValueError):
    """A saved state does not fit the loader it is given to; the message lists the differences."""


class DatasetNotFoundError(AioloadError, FileNotFoundError):
    """A folder does not hold the files a dataset is made of; the message says what was found instead."""


def error_context(exc: BaseException) -> ErrorContext | None:
    """Return where in the data the exception came from, or ``None`` when it did not come through a loader.

    Args:
        exc: An exception caught around ``for``, ``async for`` or ``next``.
    """
    context = getattr(exc, _CONTEXT, None)
    return context if isinstance(context, ErrorContext) else None


def context_of(exc: BaseException, index: Any, location: Any, stage: str) -> ErrorContext:
    """Return where an error happened; what ``__getitem__`` raises may itself say which file that was."""
    inner = error_context(exc) if location is None and stage == "fetch" and not isinstance(index, list) else None
    return ErrorContext(index, location if inner is None else inner.location, stage)


def annotate(exc: BaseException, context: ErrorContext) -> None:
    """Put ``context`` on ``exc``, as an attribute and as a note, in place of an earlier one of ours.

    An exception object that user code raises twice (a cached one) carries the context of its last delivery. The
    exception's own ``__setattr__`` and ``add_note`` are not asked: a frozen dataclass, say, would refuse both.
    """
    with contextlib.suppress(Exception):
        object.__setattr__(exc, _CONTEXT, context)
        others = [note for note in getattr(exc, "__notes__", ()) if not str(note).startswith(_NOTE_PREFIX)]
        object.__setattr__(exc, "__notes__", [*others, context.describe()])


def is_interrupt(exc: BaseException) -> bool:
    """Whether ``exc`` is Ctrl-C, which comes in the main thread alone, and not the doing of code in another."""
    return isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def read_timeout(location: Any, timeout_s: float) -> ReadTimeoutError:
    """Return the error of a read of ``location`` that has been given up after ``timeout_s`` seconds."""
    return ReadTimeoutError(errno.ETIMEDOUT, f"No answer from the storage within {timeout_s:g} s", location)


def safe_to_raise(exc: BaseException) -> BaseException:
    """Return ``exc``, or in place of a ``StopIteration``, which would end the caller's loop, an error of ours."""
    if not isinstance(exc, StopIteration | StopAsyncIteration):
        return exc
    error = StoppedIterationError(f"User code raised {text_of(exc)}, which would have ended the loop in silence.")
    error.__cause__ = exc
    return error


def describe_sample(index: Any, location: Any) -> str:
    """Return how a sample is called in a message."""
    return f"index {index!r}" if location is None else f"index {index!r} ({str(location)!r})"


def text_of(exc: BaseException) -> str:
    """Return an exception's ``repr``, or its class where that fails itself."""
    try:
        return repr(exc)
    except Exception:
        return f"{type(exc).__qualname__}, which has no text"


def strip(exc: BaseException) -> BaseException:
    """Return ``exc`` without the topmost frame of its traceback: our own, which would keep all it works with alive."""
    traceback = exc.__traceback__
    return exc.with_traceback(traceback.tb_next if traceback is not None else None)


def _shorten(indices: list[Any]) -> str:
    if len(indices) <= 8:
        return repr(indices)
    return f"[{', '.join(map(repr, indices[:6]))}, ... {len(indices) - 6} more]"
