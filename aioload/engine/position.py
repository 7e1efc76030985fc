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
        return sorted(self._ahead)

    def add(self, number: int, mark: Any) -> None:
        """Note that a batch has been handed out."""
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
                for each in range(self.done, end):
                    del self._ahead[each]
                self.done, self.mark = end, later


class Position:
    """How far the consumer of one pass has come. Belongs to the run, under its lock.

    Args:
        lanes: Where each lane begins.
        num_yielded: Batches handed out in this epoch before.

    Attributes:
        num_errors: Samples that this epoch went without so far.
    """

    def __init__(self, lanes: Sequence[Progress], num_yielded: int = 0, latest_lane: int = -1) -> None:
        self.lanes = list(lanes)
        self.num_yielded = num_yielded
        self.latest_lane = latest_lane
        self.num_errors = 0
        self.is_over = False

    def add(self, place: Place | None) -> None:
        """Note that the consumer gets the batch at ``place``."""
        self.num_yielded += 1
        self.pass_by(place)

    def pass_by(self, place: Place | None) -> None:
        """Note that the consumer is beyond ``place`` and gets no batch for it."""
        if place is not None:
            self.lanes[place.lane].add(place.number, place.mark)
            self.latest_lane = place.lane


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
