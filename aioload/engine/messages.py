"""Messages: what travels between a loader and its engine processes, pickled, beside the memory of the slots."""

import pickle
from typing import Any, NamedTuple

from aioload.engine.channel import Channel
from aioload.engine.packing import Span
from aioload.engine.position import Place

# To the engine process.


class Contents(NamedTuple):
    """What the process is given, in the files that come with these, unless it was given it when it was started."""

    is_last: bool


class Hello(NamedTuple):
    """The next message, with the file of the :class:`~aioload.engine.marks.Marks`."""


class Begin(NamedTuple):
    """A pass begins, of that number among all that the process is told of."""

    of: int
    epoch: int
    base_seed: int
    epoch_told: int | None
    """What ``set_epoch`` of the dataset is to be called with, where that is news."""
    saved: Any
    """Where the iterators of an iterable dataset are to begin."""


class Notes(NamedTuple):
    """What has happened on the consumer's side: segments that nobody sees any more, and batches that it has.

    Where an interrupt comes while these are sent, they are sent again; so each says what exactly it is about.
    """

    freed: list[tuple[int, int]]
    """Segment, and how many times it has been sent so far."""
    taken: list[tuple[int, int]]
    """Pass and number within the share."""


class Load(NamedTuple):
    """A batch is to be loaded."""

    of: int
    number: int
    """Within the share, from 0."""
    indices: list[Any]
    first_mark: int
    """Where the marks of its samples begin, and end; see :class:`~aioload.engine.marks.Span`."""
    end_mark: int
    freed: list[tuple[int, int]]
    """As of :class:`Notes`, and so are those taken."""
    taken: list[tuple[int, int]]


class Widen(NamedTuple):
    """The consumer has been waiting for long."""


class End(NamedTuple):
    """A pass is over, or given up."""

    of: int


# From it.


class Made(NamedTuple):
    """What became of a batch: rows of a slot, leaf by leaf, or pieces, or an error; or nothing if there was no data."""

    segment: int | None = None
    """The memory of the slot, if it has one: this side's until the other one says that nobody sees it."""
    layout: bytes | None = None
    """Of rows, pickled; batches with the same layout have the very same bytes."""
    texts: dict[int, list[Any]] | None = None
    """The columns that are not in the slot, by the number of the leaf."""
    pieces: tuple[bytes, list[Span]] | None = None
    """Where it has no layout: the pickle, and where its buffers are; see :mod:`~aioload.engine.packing`."""
    error: tuple[bytes, tuple[Any, Any, str]] | None = None
    """The error, and where it happened."""


class Done(NamedTuple):
    """A batch is there."""

    of: int
    number: int
    is_end: bool
    indices: list[Any] | None
    """If they are not those it was asked for."""
    place: Place | None
    failed: dict[int, tuple[Any, Any, str, bytes]] | None
    """Samples that it is made without, by position, if there are any."""
    num_bytes: int
    totals: tuple[Any, ...] | None
    """The fields of :class:`Totals`; ``None`` where they were told a moment ago and will be soon."""
    dropped: list[int]
    """Segments that are gone."""
    # As of Made.
    segment: int | None
    layout: bytes | None
    texts: dict[int, list[Any]] | None
    pieces: tuple[bytes, list[Span]] | None
    error: tuple[bytes, tuple[Any, Any, str]] | None


class Totals(NamedTuple):
    """What the process has done and holds."""

    sums: list[float]
    """By the fields of a :class:`~aioload.stats.Tally`."""
    reads_limit: int
    decode_limit: int
    num_bytes: int
    peak_bytes: int


class Begun(NamedTuple):
    """``worker_init_fn`` has returned in all threads of the process."""

    is_single: bool
    """Whether that is but one."""


class Broken(NamedTuple):
    """The process cannot go on: an error of all its passes."""

    error: bytes


_KINDS: tuple[Any, ...] = (Contents, Hello, Begin, Notes, Load, Widen, End, Done, Begun, Broken)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def send(channel: Channel, message: NamedTuple, file: int | None = None) -> None:
    """Send a message, and with it a copy of an open file. If nobody is there any more, that is found out elsewhere."""
    # The kind by its number, and none within another: a class by its name takes 2 us here, and 2 there.
    channel.send(pickle.dumps((_NUMBERS[type(message)], *message), pickle.HIGHEST_PROTOCOL), file)


def received(packed: bytes) -> Any:
    """Return the message that :func:`send` was given."""
    number, *fields = pickle.loads(packed)
    return _KINDS[number]._make(fields)
