"""SeekableSampler: epochs, positions and saved states, for samplers whose items can be asked for by position."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import Sampler

from aioload.arguments import whole_number
from aioload.samplers.seekable import JSON
from aioload.samplers.states import checked

FIRST_BLOCK = 64
MAX_BLOCK = 8192

T_co = TypeVar("T_co", covariant=True)


class Place(NamedTuple):
    """An item of an epoch, or the place before it."""

    epoch: int
    position: int


class SeekableSampler(Sampler[T_co], ABC):
    """A sampler for any loader, whose items depend on its arguments, the epoch and the position alone.

    The first ``iter()`` yields epoch 0 and each later one the next epoch, whether or not the one before was
    exhausted. Copies, by pickle or otherwise, are at the same place, though iterators stay with the original.

    One thread at a time may call ``iter()`` and what sets or saves the place. An iterator belongs to the thread that
    uses it.
    """

    def __init__(self) -> None:
        self._next = Place(0, 0)
        self._latest: _Pass | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items of an epoch, the same for each."""

    @abstractmethod
    def blocks(self, epoch: int, positions: range) -> Iterator[Sequence[T_co]]:
        """Yield the items of ``epoch`` at ``positions``, in that order, in blocks of any length.

        The positions rise and lie within ``range(len(self))``. This must not change the sampler.
        """

    @abstractmethod
    def fingerprint(self) -> dict[str, JSON]:
        """Return what a saved state must agree with, short enough to be kept in every checkpoint."""

    @property
    def epoch(self) -> int:
        """The epoch of the latest ``iter()``; that of the next before any, and after one was set or loaded."""
        return self._next.epoch if self._latest is None else self._latest.start.epoch

    @property
    def next_epoch(self) -> int:
        """The epoch that the next ``iter()`` will yield."""
        return self._next.epoch

    @property
    def next_position(self) -> int:
        """The position at which the next ``iter()`` will begin: 0, unless a state was loaded."""
        return self._next.position

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` yield ``epoch``.

        It begins at the start, unless a state in the middle of that very epoch has been loaded: a training loop may
        call ``set_epoch`` before each epoch and is still resumed where it was.

        Raises:
            ArgumentError: ``epoch`` is no whole number of at least 0.
        """
        epoch = whole_number("epoch", epoch, 0)
        if self._latest is not None or epoch != self._next.epoch:
            self._next = Place(epoch, 0)
        self._latest = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iterator is, for JSON, in less than about 300 bytes.

        Returns:
            ``epoch``; ``position``, the number of its items yielded so far; and ``sampler``, the fingerprint. At the
            end of an epoch this is the start of the next. Before the first ``iter()``, and after an epoch was set
            or a state loaded, it is where the next ``iter()`` will begin.
        """
        epoch, position = self._next if self._latest is None else self._latest.place()
        return {"epoch": epoch, "position": position, "sampler": self.fingerprint()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` continue where a state was saved.

        Raises:
            ArgumentError: The state is of a sampler that differs, the message says in what; or it is no state at all.
        """
        self._next = Place(*checked(state_dict, self.fingerprint(), len(self)))
        self._latest = None

    def __iter__(self) -> Iterator[T_co]:
        """Yield the items of the next epoch, from where a state was loaded if one was."""
        (epoch, position), length = self._next, len(self)
        blocks = self.blocks(epoch, range(position, length))
        latest = self._latest = _Pass(self._next, length, position)
        self._next = Place(epoch + 1, 0)
        return chain.from_iterable(latest.follow(blocks))

    def iter_from(self, epoch: int, position: int, /) -> Iterator[T_co]:
        """Return the items of ``epoch`` from ``position`` on; the sampler stays as it is.

        Raises:
            ArgumentError: There is no such epoch or position.
        """
        length = len(self)
        start = whole_number("position", position, 0, length)
        return chain.from_iterable(self.blocks(whole_number("epoch", epoch, 0), range(start, length)))


class _Pass:
    """One ``iter()``: where it began and how far it has come.

    Counting costs nothing per item: what is left of the present block is asked of the block's own iterator.
    """

    def __init__(self, start: Place, length: int, position: int) -> None:
        self.start = start
        self._length = length
        self._block: tuple[int, Iterator[object]] = (position, iter(()))  # where it ends, what is left of it

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Pass, (self.start, self._length, self._position()))

    def place(self) -> Place:
        """Return the place after the last item yielded: after the last of all, the start of the next epoch."""
        position = self._position()
        if position >= self._length:
            return Place(self.start.epoch + 1, 0)
        return Place(self.start.epoch, position)

    def follow(self, blocks: Iterable[Sequence[T_co]]) -> Iterator[Iterator[T_co]]:
        """Yield an iterator over each block and note how far that comes."""
        for block in blocks:
            items = iter(block)
            self._block = (self._block[0] + len(block), items)
            yield items

    def _position(self) -> int:
        end, left = self._block
        return end - operator.length_hint(left)


def growing(positions: range, longest: int = MAX_BLOCK) -> Iterator[range]:
    """Yield ``positions`` in parts: a short one, so that the first item comes at once, then longer ones."""
    begin, size = 0, FIRST_BLOCK
    while begin < len(positions):
        yield positions[begin : begin + size]
        begin, size = begin + size, min(4 * size, longest)
