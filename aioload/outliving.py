"""Outliving: memory that a device may still be reading when its ring is gone."""

from collections import deque
from typing import Protocol

from aioload.slot import Slot, SlotState


class Passing(Protocol):
    """An event of a device's; see :class:`~aioload.device.Event`."""

    def query(self) -> bool:
        """Return whether it has passed. Never waits."""
        ...


_outliving: deque[tuple[Slot, Passing]] = deque()
"""Slots whose rings are gone, and whose memory, page-locked where it was, a device may still be reading."""


def outlive(copying: "deque[tuple[Slot, Passing]]") -> None:
    """Keep memory that torch does not know to be in use, as it would its own, when a ring is gone."""
    _outliving.extend(pair for pair in copying if pair[0].is_locked)
    sweep()


def sweep() -> None:
    """Let go what devices have read. Any thread; never waits."""
    for _ in range(len(_outliving)):
        try:
            pair = _outliving.popleft()
        except IndexError:  # another thread does the same
            return
        slot, event = pair
        try:
            if not event.query():
                _outliving.append(pair)
        except Exception:
            drop(slot)


def drop(slot: Slot) -> None:
    """Let a slot go that something may be reading, nobody knows until when."""
    slot.state = SlotState.DROPPED
    if slot.is_locked:
        assert slot.foreign is not None
        slot.foreign.before_unmapping(_refuse)


def _refuse() -> bool:
    return False
