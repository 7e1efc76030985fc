"""Tolerance: what is done about samples that fail, where the user does not want that to end the loop.

Threads note what failed in the batch; it counts when the consumer comes to that batch. So what is listed, and which
error is one too many, follows from the order of the batches and not from timing.
"""

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from aioload.engine.position import Position
from aioload.errors import (
    ErrorContext,
    SampleError,
    TooManyErrorsError,
    annotate,
    describe_sample,
    safe_to_raise,
    text_of,
)

logger = logging.getLogger("aioload")

MAX_RECORDS = 10_000
"""Errors that a log keeps; of earlier ones it has the number."""

OnError: TypeAlias = Literal["raise", "skip", "replace"] | Callable[[Exception], Any]


class ErrorLog:
    """The samples that a loader's passes went without. The consumers' threads write, any thread may read."""

    def __init__(self) -> None:
        self._records: deque[tuple[int, SampleError]] = deque(maxlen=MAX_RECORDS)  # each with its number, from 1
        self._lock = threading.RLock()  # a signal handler may want it too

    @property
    def count(self) -> int:
        """How many there have been."""
        try:
            return self._records[-1][0]
        except IndexError:
            return 0

    def __repr__(self) -> str:
        return f"<ErrorLog {self.count}>"

    def __reduce__(self) -> tuple[type["ErrorLog"], tuple[()]]:
        return ErrorLog, ()  # errors need not be picklable, and a copy of a loader has met none

    def extend(self, records: Sequence[SampleError]) -> None:
        """Note some more."""
        with self._lock:
            for record in records:
                self._records.append((self.count + 1, record))

    def extend_again(self, records: Sequence[SampleError]) -> None:
        """Note some more, of which some may have been noted when an interrupt cut that short."""
        noted = {id(record) for _, record in self._records.copy()}
        self.extend([record for record in records if id(record) not in noted])

    def records(self) -> list[SampleError]:
        """Return the latest, oldest first."""
        return [record for _, record in self._records.copy()]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What the user wants done about a sample that fails.

    Attributes:
        on_error: ``"skip"``, ``"replace"``, or a function that returns a sample for an exception.
        max_errors: How many one pass may have, or ``None``.
        log: Where they are listed.
    """

    on_error: OnError
    max_errors: int | None
    log: ErrorLog

    @property
    def stand_in(self) -> Callable[[Exception], Any] | None:
        """What makes a sample of an error."""
        return self.on_error if callable(self.on_error) else None

    def sources(self, num_samples: int, failed: Container[int]) -> list[int]:
        """Return, for each sample of the batch that is to be made, the position that it is taken from.

        Args:
            num_samples: Samples that the batch should have had.
            failed: The positions of those it lacks.
        """
        good = [position for position in range(num_samples) if position not in failed]
        if self.on_error == "skip" or not good:
            return good
        sources, latest = [], good[0]  # the first ones, if they failed, have nothing before them
        for position in range(num_samples):
            latest = latest if position in failed else position
            sources.append(latest)
        return sources


class Losses:
    """What one pass goes without. Belongs to the consumer.

    Args:
        tolerance: How much is allowed; ``None`` where nothing can be lost.
        position: Where the consumer is; with what was lost before the pass was resumed.
    """

    def __init__(self, tolerance: Tolerance | None, position: Position) -> None:
        self._tolerance, self._position = tolerance, position
        self.count = position.num_errors
        """How many there are; that of the position is behind, by what the consumer has not got yet."""
        self._is_logged = False
        self._last: SampleError | None = None

    def note(self, records: Sequence[SampleError], *, again: bool = False) -> TooManyErrorsError | None:
        """List the errors of a batch that the consumer comes to; return one of our own if this pass has too many.

        Args:
            records: The errors, which the caller has counted.
            again: Whether an interrupt may have cut short another call for this batch.
        """
        if self._tolerance is None or not records:
            return None
        if not self._is_logged:
            self._is_logged = True
            index, location, stage, error = records[0]
            where = describe_sample(index, location)
            # What is logged may be kept: so the error's text, and not what it refers to.
            logger.warning(
                "A sample could not be loaded: %s, stage %r: %s; see loader.errors().", where, stage, text_of(error)
            )
        if again:
            self._tolerance.log.extend_again(records)
        else:
            self._tolerance.log.extend(records)
        self._last = records[-1]
        allowed = self._tolerance.max_errors
        if allowed is None or self.count <= allowed:
            return None
        what = "1 sample" if self.count == 1 else f"{self.count} samples"
        return self._too_many(f"{what} of this pass could not be loaded; max_errors allows {allowed}.")

    def check_end(self) -> None:
        """Refuse, once, to end a pass in which nothing but errors came.

        Raises:
            TooManyErrorsError: There was no batch at all.
        """
        if self._last is not None and self._position.num_yielded == 0:
            what = "1 error" if self.count == 1 else f"{self.count} errors"
            message = f"None of this pass's samples could be loaded: {what} and no batch."
            raise self._too_many(message)

    def _too_many(self, message: str) -> TooManyErrorsError:
        assert self._last is not None
        error = TooManyErrorsError(f"{message} The last one: {text_of(self._last.error)}. loader.errors() lists them.")
        error.__cause__, self._last = self._last.error, None
        return error


def record_of(exc: BaseException, context: ErrorContext) -> SampleError:
    """Return the record of a sample that failed, which keeps nothing of what the user's code worked with alive."""
    error = safe_to_raise(exc)
    annotate(error, context)
    return SampleError(*context, error)


def let_go(record: SampleError) -> None:
    """Clear the variables of the functions that an error came through; their lines remain."""
    error: BaseException | None = record.error
    for _ in range(100):  # a chain may be a circle
        if error is None:
            break
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
