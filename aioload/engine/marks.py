"""Marks: which samples another process is loading, in memory that is there when the process is not."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from aioload.engine.segments import map_file, new_file

_NUM_BYTES = 1 << 18


class Span(NamedTuple):
    """Where the marks of a batch are, a byte for each sample."""

    start: int
    stop: int

    @property
    def is_empty(self) -> bool:
        """Whether there was no room for them."""
        return self.start == self.stop


class Marks:
    """A byte for each sample of the batches given to a process of late: how often its loading has gone a stage further.

    Args:
        file: The memory, from the process that has the batches loaded, and closed here; ``None`` for new memory.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file: int | None = None
        """For the other process, until :meth:`close`."""
        try:
            if file is None:
                self.file = new_file(_NUM_BYTES)
                file = os.dup(self.file)
            self.memory = map_file(file)
        except BaseException:
            self.close()
            raise
        self._end = 0

    def close(self) -> None:
        """Close the file: the other process has it. Again, it does nothing."""
        file, self.file = self.file, None
        if file is not None:
            os.close(file)

    def new_span(self, num_samples: int) -> Span:
        """Return where a batch has its marks, over those of one that was begun long ago; none if it is too large."""
        if num_samples > _NUM_BYTES:
            return Span(0, 0)
        start = 0 if self._end + num_samples > _NUM_BYTES else self._end
        span = Span(start, start + num_samples)
        self._end = span.stop
        self.memory[span.start : span.stop] = bytes(num_samples)
        return span

    def of(self, span: Span) -> Sequence[int]:
        """Return the marks of a batch."""
        return bytes(self.memory[span.start : span.stop])
