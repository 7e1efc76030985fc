"""Messages: what travels between a loader and its engine processes, pickled, beside the memory of the slots."""

import pickle
from typing import Any, NamedTuple

from aioload.engine import marks
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
    marks: marks.Span
    notes: Notes | None


class Widen(NamedTuple):
    """The consumer has been waiting for long."""


class End(NamedTuple):
    """A pass is over, or given up."""

    of: int


# From it.


class InRows(NamedTuple):
    """A batch in a slot, leaf by leaf. It owns the slot until the other side says that nobody sees it."""

    segment: int
    layout: bytes
    """Pickled; batches with the same layout have the very same bytes."""
    texts: dict[int, list[Any]]
    """The columns that are not in the slot, by the number of the leaf."""


class InPieces(NamedTuple):
    """A batch that has no layout; see :mod:`~aioload.engine.packing`."""

    segment: int | None
    pickled: bytes
    spans: list[Span]


class Failed(NamedTuple):
    """A batch that is an error."""

    error: bytes
    context: tuple[Any, Any, str]


class Done(NamedTuple):
    """A batch is there."""

    of: int
    number: int
    made: InRows | InPieces | Failed | None
    """``None`` where there was no data for it."""
    is_end: bool
    indices: list[Any] | None
    """If they are not those it was asked for."""
    place: Place | None
    failed: dict[int, tuple[Any, Any, str, bytes]]
    """Samples that it is made without, by position."""
    num_bytes: int
    totals: "Totals | None"
    """``None`` where they were told a moment ago and will be soon."""
    dropped: list[int]
    """Segments that are gone."""


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


class Broken(NamedTuple):
    """The process cannot go on: an error of all its passes."""

    error: bytes


_KINDS: tuple[Any, ...] = (
    *(Contents, Hello, Begin, Notes, Load, Widen, End, marks.Span),
    *(InRows, InPieces, Failed, Done, Totals, Begun, Broken),
)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_NESTED = {
    kind: [kind._fields.index(name) for name in names]
    for kind, names in ((Load, ("marks", "notes")), (Done, ("made", "totals")))
}
"""Where messages have others in them, which may be ``None``."""


def send(channel: Channel, message: NamedTuple, file: int | None = None) -> None:
    """Send a message, and with it a copy of an open file. If nobody is there any more, that is found out elsewhere."""
    channel.send(pickle.dumps(_fields_of(message), pickle.HIGHEST_PROTOCOL), file)


def received(packed: bytes) -> Any:
    """Return the message that :func:`send` was given."""
    return _message_of(pickle.loads(packed))


def _fields_of(message: Any) -> list[Any]:
    """Return the fields, and behind them the number of the kind: a class by its name takes 2 us here, and 2 there."""
    kind, fields = type(message), list(message)
    for position in _NESTED.get(kind, ()):
        if fields[position] is not None:
            fields[position] = _fields_of(fields[position])
    fields.append(_NUMBERS[kind])
    return fields


def _message_of(fields: list[Any]) -> Any:
    kind = _KINDS[fields.pop()]
    for position in _NESTED.get(kind, ()):
        if fields[position] is not None:
            fields[position] = _message_of(fields[position])
    return kind._make(fields)
