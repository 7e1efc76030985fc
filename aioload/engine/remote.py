"""Remote: the fetcher of a run whose batches other processes load."""

import weakref
from typing import Any

from aioload.engine import abroad
from aioload.engine.batch import Batch
from aioload.engine.gang import Gang
from aioload.engine.marks import Span
from aioload.engine.messages import Done
from aioload.errors import ErrorContext
from aioload.layout import Layout
from aioload.slot import Slot


class RemoteFetcher:
    """Gives each batch to the process whose turn it is, and takes in what comes back.

    Args:
        gang: The processes.
        epoch: The number of the pass.
        base_seed: Drawn for the workers.
        epoch_told: What the dataset's ``set_epoch`` was called with.
        saved: Where the iterators of an iterable dataset are to begin.
    """

    def __init__(self, gang: Gang, epoch: int, base_seed: int, *, epoch_told: int | None, saved: Any) -> None:
        self._gang, self._num_processes = gang, len(gang.members)
        self._open: dict[int, Batch] = {}
        self._marks: dict[int, Span] = {}
        self._of = gang.enter(self, epoch, base_seed, epoch_told=epoch_told, saved=saved)
        # Where a run is gone that was never closed; else the processes would keep what they have loaded for it.
        weakref.finalize(self, gang.leave, self._of).atexit = False

    def submit(self, batch: Batch) -> None:
        """Send its indices to a process."""
        self._open[batch.number] = batch
        if batch.number not in self._marks:  # else an interrupt may have come behind its being sent
            self._marks[batch.number] = self._gang.new_span(batch.number, len(batch.indices))
        self._gang.load(self._of, batch.number, list(batch.indices), self._marks[batch.number])

    def resubmit(self, jobs: list[Any]) -> None:
        """Never called: jobs are held back where they are done."""
        raise AssertionError

    def note_taken(self, batch: Batch) -> None:
        """Note that the consumer has a batch."""
        self._gang.note_taken(self._of, batch.number)

    def attend(self) -> None:
        """Have batches taken in: the consumer waits."""
        self._gang.attend()

    def flush(self) -> None:
        """Have the processes told what the consumer has taken and let go."""
        self._gang.flush()

    def close(self) -> None:
        """Have the processes give the pass up."""
        self._gang.leave(self._of)
        self._open.clear()

    def waiting_for(self, process: int) -> Batch | None:
        """Return the first batch that a process has not delivered."""
        numbers = [number for number in list(self._open) if number % self._num_processes == process]
        return self._open.get(min(numbers, default=-1))

    def under_way(self, process: int) -> list[tuple[Batch, int]]:
        """Return the samples that a process is loading: their batches and positions, those farthest on first."""
        samples = []
        for number, batch in sorted(self._open.copy().items()):
            if number % self._num_processes == process and number in self._marks:
                marks = self._gang.marks_of(number, self._marks[number])
                samples += [(-mark, number, batch, position) for position, mark in enumerate(marks) if mark]
        samples.sort(key=lambda sample: sample[:2])
        return [(batch, position) for _, _, batch, position in samples]

    def being_loaded(self, batch: Batch) -> list[int]:
        """Return the positions of a batch that its process is loading, those farthest on first."""
        span = self._marks.get(batch.number)
        marks = b"" if span is None else self._gang.marks_of(batch.number, span)
        return sorted((position for position, mark in enumerate(marks) if mark), key=lambda each: -marks[each])

    def arrive(self, process: int, done: Done, slot: Slot | None, layout: Layout | None) -> None:
        """Take in a batch. On the gang's thread."""
        number = done.number * self._num_processes + process
        self._marks.pop(number, None)
        batch = self._open.pop(number, None)
        if batch is None:  # closed meanwhile
            if slot is not None:
                self._gang.release(slot)
            return
        if done.indices is not None:
            batch.indices = done.indices
        if done.place is not None:
            batch.place = done.place
        if done.failed is not None:
            batch.failed = {position: abroad.unpack_record(record) for position, record in done.failed.items()}
        batch.slot, batch.layout, batch.pieces = slot, layout, done.pieces
        if layout is not None:
            if done.texts is not None:
                batch.columns = [done.texts.get(number, []) for number in range(len(layout.leaves))]
        elif done.error is not None:
            error, context = done.error
            batch.error, batch.context = abroad.unpack_error(error), ErrorContext(*context)
        elif done.pieces is None:
            batch.is_end, batch.is_skipped = done.is_end, not done.is_end
        batch.arrive(done.num_bytes)
