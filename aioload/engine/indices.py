"""Indices: the stream of indices of one pass, drawn from the sampler in the consumer's thread.

Samplers draw from generators that the training step may use as well. Drawing a batch's indices only inside
``iter()`` and ``next()`` makes the interleaving, and so the order, the same in every run, and torch's.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioload.engine.appearance import Appearance
from aioload.engine.cursors import can_seek
from aioload.engine.epochs import batched_by_torch, innermost
from aioload.engine.generators import StandIn, distinct, draw_base_seed, exchange, in_state
from aioload.engine.position import Place, Progress, as_ranges, from_ranges
from aioload.engine.replay import cursor_for, epochs_of, set_epochs
from aioload.errors import ErrorContext, annotate, safe_to_raise

_STATELESS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class IndexStream:
    """The indices of one pass: one entry per batch, or per sample where samples are not batched.

    Args:
        sampler: The loader's batch sampler, or its sampler where samples are not batched.
        generator: The loader's generator.
        epoch: The number of the pass.
        base_seed: That of workers which live already; new ones get theirs from the generator, as torch's do.
        saved: Where another pass was, by its state, to go on behind it.
        stand_in: Returns what torch's samplers are to draw from in place of the global generator, if anything.
    """

    def __init__(
        self,
        sampler: Any,
        generator: torch.Generator | None,
        *,
        epoch: int = 0,
        base_seed: int | None = None,
        saved: Mapping[str, Any] | None = None,
        stand_in: StandIn | None = None,
    ) -> None:
        saved = saved or {}
        self.epoch, self._sampler = epoch, sampler
        self.place = Place(0, saved.get("num_done", 0), None)
        """That of the entry drawn last."""
        self.progress = Progress(self.place.number, from_ranges(saved.get("ahead", ())))
        """Where the consumer begins; for whoever counts what it gets."""
        self.is_lost = False
        """Whether an interrupt, if one came, was in the middle of the sampler, and ended its generator for good."""
        self._entry: list[Any] = []  # what the sampler has given and nobody has got yet
        self._marked: tuple[int, Any] = -1, None  # the mark of that, by its number
        self._next = self.place.number
        self._num_asked = saved.get("sampler", {}).get("num_asked", self._next)
        self._skipped = frozenset(from_ranges(saved.get("ahead", ())))
        base_seed = saved.get("base_seed", base_seed)
        # It is kept without the stand-in, which leads to much else; who begins again has drawn from that before.
        self._new_cursor = functools.partial(cursor_for, sampler, generator, epoch=epoch, seeds=base_seed is None)
        self._cursor = self._new_cursor(stand_in=stand_in)
        self._draws_on_cpu = type(innermost(sampler)) in _DRAWING
        try:
            with self._device():
                self._entries = self._cursor.begin(saved.get("sampler"), self._next)
        except BaseException as exc:
            annotate(exc, ErrorContext(None, None, "sampler"))
            raise
        self.base_seed = draw_base_seed(generator) if base_seed is None else base_seed
        self._cursor.seeded()

    def draw(self, *, batched: bool) -> list[Any]:
        """Return the indices of the next batch; one where samples are not ``batched``.

        After an interrupt it may be called again, unless :attr:`is_lost`.

        Raises:
            StopIteration: There are no more.
            BaseException: What the sampler raised.
        """
        while True:
            if not self._entry:
                self._ask()
            entry, number = self._entry[0], self._next
            if self._marked[0] != number:
                self._marked = number, self._cursor.mark(entry)
            place, is_skipped = Place(0, number, self._marked[1]), number in self._skipped
            indices = [] if is_skipped else self._indices(entry) if batched else [entry]
            # An interrupt comes before this, and all of it can be done again, or after: see Position.add.
            self._next, self.place = number + 1, place
            del self._entry[0]
            if not is_skipped:
                return indices

    def _ask(self) -> None:
        """Have the next entry in hand."""
        entry = map(next, (self._entries,))
        if not self._draws_on_cpu or torch.empty(0).is_cpu:  # 1 us; get_default_device() and a context take 6
            self._add(entry)
        else:
            with self._device():
                self._add(entry)
        if not self._entry:
            raise StopIteration

    def _add(self, entry: Iterator[Any]) -> None:
        try:
            self._entry.extend(entry)  # the sampler is asked by one call, behind which nothing can be lost
        except BaseException as exc:
            self.is_lost = not self._entry
            if self.is_lost and isinstance(exc, KeyboardInterrupt) and self._cursor.can_begin_again:
                self._begin_again()
            raise
        finally:
            # Also where there is none: it may have drawn numbers to find its end.
            self._num_asked = max(self._num_asked, self._next + 1)

    def _begin_again(self) -> None:
        """Go on as another pass would that is resumed here: a generator of the sampler was ended in the middle."""
        mark = self._marked[1] if self._marked[0] == self._next - 1 else None
        saved = self._cursor.state(self._next, max(self._num_asked, self._next + 1), mark)
        epochs = epochs_of(self._sampler)  # they may be those of the next pass already
        with contextlib.suppress(Exception), self._device():
            cursor = self._new_cursor()
            entries = cursor.begin(saved, self._next)
            cursor.seeded()
            set_epochs(self._sampler, epochs)
            self._cursor, self._entries, self.is_lost = cursor, entries, False

    def _indices(self, entry: Any) -> list[Any]:
        try:
            return list(entry)
        except StopIteration as exc:
            raise safe_to_raise(exc) from exc
        except BaseException:
            self.is_lost = type(entry) not in (list, tuple)  # it may have given some of them
            raise

    def _device(self) -> AbstractContextManager[Any]:
        """Have torch's samplers draw on the CPU, for which their generators are, whatever the default device is."""
        if self._draws_on_cpu and torch.get_default_device().type != "cpu":
            return torch.device("cpu")
        return contextlib.nullcontext()

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return, for JSON, what :class:`IndexStream` needs to go on behind what has been handed out."""
        state: dict[str, Any] = {
            "num_done": progress.done,
            "base_seed": self.base_seed,
            "sampler": self._cursor.state(progress.done, self._num_asked, progress.mark),
        }
        if progress.ahead:
            state["ahead"] = as_ranges(progress.ahead)
        return state


def can_run_ahead(sampler: Any) -> bool:
    """Whether a second pass over ``sampler`` may begin before the first is over.

    True for our own samplers and torch's, whose only state is the generator they draw from.
    """
    return type(batched_by_torch(sampler)) in _STATELESS or can_seek(sampler)


class Lookahead:
    """What a pass that began early depends on, so that it can be dropped if any of it has changed since.

    Args:
        epoch: The number of the pass.
        sampler: The loader's batch sampler, or its sampler.
        generator: The loader's generator.
        others: What else samples depend on: the dataset, and what makes batches of them.

    The generators are put back after drawing ahead, and moved on only when the pass is taken up. So whoever
    else draws from them, or seeds them, sees the numbers they would see without a look-ahead. The global one has a
    stand-in meanwhile: threads may draw from it at any time, and would draw the same once more if it were put back.
    """

    def __init__(self, epoch: int, sampler: Any, generator: torch.Generator | None, *others: Any) -> None:
        self.epoch = epoch
        own = getattr(batched_by_torch(sampler), "generator", None)
        self._generators = distinct((generator, own))
        self._before = self._states()
        self._after = self._before
        # While they are moved: where others left them, and then where drawing has.
        self._present, self._reached = list[torch.Tensor](), list[torch.Tensor]()
        self._global_before = torch.default_generator.get_state()
        self._stand_in: torch.Generator | None = in_state(self._global_before)
        self._objects = (sampler, *others)
        self._appearance = Appearance(*self._objects)

    def stand_in(self) -> torch.Generator | None:
        """Return what is to be drawn from in place of the global generator, until the pass is taken up."""
        return self._stand_in

    def drawing(self, draw: Callable[[], None]) -> None:
        """Call ``draw``, which draws for the pass that began early; nobody else sees the generators move."""
        self._put_back()
        try:
            exchange(self._generators, self._after, self._present)
            draw()
        finally:
            try:
                self._put_back()
            finally:
                self._put_back()  # an interrupt may have come before the first did

    def take_up(self, epoch: int) -> bool:
        """Make the draws count and return True, or return False if something has changed, ``epoch`` too."""
        self._put_back()
        states, before = [torch.default_generator.get_state(), *self._states()], [self._global_before, *self._before]
        if epoch != self.epoch or not all(torch.equal(a, b) for a, b in zip(states, before, strict=True)):
            return False
        if not self._appearance.is_still(*self._objects):
            return False
        for generator, state in zip(self._generators, self._after, strict=True):
            generator.set_state(state)
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None and not torch.equal(moved := stand_in.get_state(), self._global_before):
            torch.default_generator.set_state(moved)
        return True

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _put_back(self) -> None:
        """Have the generators be where others left them. After an interrupt it may be called again."""
        if self._present:
            if not self._reached:
                exchange(self._generators, self._present, self._reached)
            self._after, self._present, self._reached = self._reached, [], []
