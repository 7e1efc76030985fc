"""Position: how far the consumer has come in a pass, whatever has been loaded ahead of it."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a batch stands in its pass.

    Attributes:
        lane: Which iterator of an iterable dataset it comes from; 0 for all others.
        number: Its number within the lane, from 0 at the start of the epoch, whether resumed or not.
        mark: What there is to resume by right behind it, in terms of the sampler or dataset, or ``None``.
    """

    lane: int
    number: int
    mark: Any


class Progress:
    """Which batches of a lane have been handed out: all below ``done``, and those in ``ahead``.

    Args:
        done: Batches handed out before.
        ahead: Numbers of batches beyond that were handed out as well.
        mark: What belongs to the place right behind the first ``done`` batches.
    """

    def __init__(self, done: int = 0, ahead: Iterable[int] = (), mark: Any = None) -> None:
        self.done, self.mark = done, mark
        self._ahead: dict[int, Any] = dict.fromkeys(ahead)

    def __repr__(self) -> str:
        return f"<Progress {self.done} and {self.ahead}>"

    @property
    def ahead(self) -> list[int]:
        """The numbers of batches beyond the first one missing."""
        return sorted(number for number in self._ahead if number >= self.done)

    def copy(self) -> "Progress":
        """Return another one that is as far."""
        done, mark, ahead = self.done, self.mark, self._ahead.copy()  # at once: nothing is called before the end
        copied = Progress(done, (), mark)
        copied._ahead = ahead
        return copied

    def add(self, number: int, mark: Any) -> None:
        """Note that a batch has been handed out. Where an interrupt cuts this short, it may be called again."""
        if number < self.done:
            return
        if number != self.done:
            self._ahead[number] = mark
            if mark is None or self.done not in self._ahead:
                return
        else:
            self.done, self.mark = number + 1, mark
        end = self.done
        while end in self._ahead:  # of those that were ahead when the state was saved the marks are not known
            later, end = self._ahead[end], end + 1
            if mark is None or later is not None:
                start, self.done, self.mark = self.done, end, later
                for each in range(start, end):
                    self._ahead.pop(each, None)


class Position:
    """How far the consumer of one pass has come. Belongs to the run; any thread, and any signal handler, may read it.

    Args:
        lanes: Where each lane begins.
        num_yielded: Batches handed out in this epoch before.

    Attributes:
        num_errors: Samples that this epoch went without so far.
    """

    def __init__(self, lanes: Sequence[Progress], num_yielded: int = 0, latest_lane: int = -1) -> None:
        self._lanes = list(lanes)
        self.num_yielded = num_yielded
        self.latest_lane = latest_lane
        self.num_errors = 0
        self.is_over = False
        self._passed: dict[tuple[int, int], Any] = {}  # marks, by lane and number, of what no lane has noted yet

    @property
    def lanes(self) -> list[Progress]:
        """How far it is in each lane."""
        passed = self._passed.copy()  # before the lanes: what has been noted there meanwhile may be noted again
        lanes = [lane.copy() for lane in self._lanes]
        for (lane, number), mark in passed.items():
            lanes[lane].add(number, mark)
        return lanes

    def add(self, place: Place | None, num_errors: int = 0, num_batches: int = 1) -> None:
        """Note that the consumer is beyond ``place``, and gets a batch for it, if ``num_batches`` is not 0.

        The caller hands it over next. Python sees to signals only where something is called, a loop goes on or a
        function begins: so an interrupt comes before all of this, and leaves the batch with the caller, or after.
        """
        self.num_yielded += num_batches
        self.num_errors += num_errors
        if place is not None:
            self.latest_lane = place.lane
            self._passed[place.lane, place.number] = place.mark

    def settle(self) -> None:
        """Have the lanes note what has been added. By one thread at a time."""
        for (lane, number), mark in self._passed.copy().items():  # others may add meanwhile
            self._lanes[lane].add(number, mark)
            del self._passed[lane, number]


def as_ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return sorted numbers as ``[first, last]`` pairs: few, however many batches one slow file holds back."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def from_ranges(ranges: Iterable[Sequence[int]]) -> list[int]:
    """Return the numbers that :func:`as_ranges` was given."""
    return [number for first, last in ranges for number in range(first, last + 1)]
