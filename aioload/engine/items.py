"""Items: what comes out of an iterable dataset, by one iterator over it or by several side by side."""

import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aioload.context import HERE, PassContext, Stage
from aioload.engine.cursors import has_state
from aioload.engine.position import Place, Progress, as_ranges, from_ranges
from aioload.errors import DatasetError, StateError, is_interrupt, text_of

_ITEM = Stage.ITEM  # a member of an enum takes 0.1 us to look up


class Once:
    """Calls a ``worker_init_fn`` for workers that persist: for the first pass, or for a later one where it failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_done = False

    def call(self, worker_init_fn: Callable[[int], None], number: int) -> None:
        """Call it, unless it has returned before; wait for it if another thread is at it."""
        with self._lock:
            if not self._is_done:
                worker_init_fn(number)
                self._is_done = True


class Start:
    """What there is to resume a lane by before its first item. It outlives the lane, and keeps no iterator."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while the lane begins
        self.known: dict[str, Any] = {}

    def mark(self) -> dict[str, Any]:
        """Return it; nothing for a lane that has not begun. Any thread."""
        with self.lock:
            return self.known


class Lane:
    """One iterator over an iterable dataset, begun when it is first asked for items.

    ``lock`` admits one thread at a time. Jobs leave a queue in order, but one thread may overtake another on the
    way to the lock: ``expected`` holds the batches, and who gets the lock serves the first of them.

    Args:
        number: Which lane it is.
        context: What the dataset's code is told of the pass; its ``dataset`` is what is iterated over.
        worker: The number that the dataset's code sees; ``None`` for no worker at all.
        threaded: Whether it is worked on by threads of ours.
        saved: Where the lane was, by its state, to go on behind it.
    """

    def __init__(
        self,
        number: int,
        context: PassContext,
        worker: int | None,
        *,
        threaded: bool,
        saved: Mapping[str, Any],
    ) -> None:
        self.number = number
        self.start = Start()
        self.lock = threading.Lock()
        self.expected: deque[Any] = deque()
        self.position: int = saved.get("num_items", 0)  # items that have come, and so the place of the next
        self.ended: bool = saved.get("ended", False)
        self.stage = "fetch"  # what an error belongs to
        self._context, self._worker, self._threaded = context, worker, threaded
        self._saved = saved
        self._num_taken: int = saved.get("num_done", 0)
        self._skipped = frozenset(from_ranges(saved.get("ahead", ())))
        self._items: Iterator[Any] | None = None
        self._error: BaseException | None = None
        self._errors: list[int] = list(saved.get("errors", ()))  # after how many items each has been raised
        self.is_cut_short = False  # whether it has ended by an interrupt
        self._kept: list[Any] = []  # the items of the next batch so far: a call may be interrupted
        self._latest: Mapping[str, Any] = saved  # what the place behind the latest batch is marked by
        if self.ended and "dataset" in saved:  # nobody will ask the lane, but the next pass may depend on it
            context.dataset.load_state_dict(copy.deepcopy(saved["dataset"]))

    @property
    def is_empty(self) -> bool:
        """Whether there is certainly nothing more to take."""
        return self.ended and self._error is None and not self._kept

    def initialise(self, worker_init_fn: Callable[[int], None]) -> None:
        """Call ``worker_init_fn``; what it raises comes in place of the first batch."""
        HERE.set([self._context, None, Stage.BATCH, self._worker, None])
        try:
            worker_init_fn(self.number)
        except BaseException as exc:
            if is_interrupt(exc):
                raise
            self.stage, self.ended, self._error = "worker_init_fn", True, exc
        finally:
            HERE.set(None)

    def take(self, count: int, *, whole: bool) -> tuple[list[Any], int, Place]:
        """Return the next ``count`` items, fewer before the end or before an error, unless ``whole``.

        Batches, and errors, that were handed out before the state was saved are left out.

        Returns:
            The items, the position of the first, and the place of the batch they are.

        Raises:
            StopIteration: There are no more items, or not ``count`` of them if ``whole``.
            BaseException: What the dataset raised, once the items before it have been returned, or dropped if
                ``whole``. ``position`` is its place.
        """
        while True:
            try:
                items = self._take(count, whole=whole)
            except BaseException as exc:
                if isinstance(exc, StopIteration) or is_interrupt(exc) or self._num_taken not in self._skipped:
                    raise
                self.place_of_error()
                continue
            number, first, behind = self._num_taken, self.position, self.position + len(items)
            mark = self._mark(behind) if self._error is None else self._mark_before_error(behind, len(items))
            place, is_skipped = Place(self.number, number, mark), number in self._skipped
            # An interrupt comes before this, and all is as it was, or after: see Position.add.
            self._num_taken, self.position, self._kept = number + 1, behind, []
            if not is_skipped:
                return items, first, place

    def place_of_error(self) -> Place:
        """Return the place of the batch that :meth:`take` has raised an error for."""
        number, self._num_taken = self._num_taken, self._num_taken + 1
        self._errors.append(self.position)
        return Place(self.number, number, self._mark(self.position))

    def _take(self, count: int, *, whole: bool) -> list[Any]:
        items = self._kept
        if self._error is not None and not items:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # else its traceback refers to it by way of this frame
        while len(items) < count and self._error is None:
            try:
                self._add_next(items)
            except BaseException as exc:
                if is_interrupt(exc):
                    raise
                if whole or not items:
                    self.position += len(items)
                    self._kept = []
                    raise
                if not isinstance(exc, StopIteration):
                    self._error = exc
                break
        return items

    def _add_next(self, items: list[Any]) -> None:
        if self.ended:  # an exhausted iterator is not asked again
            raise StopIteration
        HERE.set([self._context, self.position + len(items), _ITEM, self._worker, None])
        if self._items is None:
            try:
                self._items = self._begun()
            except BaseException as exc:
                self.ended = not is_interrupt(exc)  # a dataset that gives no iterator is not asked again
                raise
        try:
            if self._threaded:
                items.append(next(self._items))
            else:
                self._add_safely(self._items, items)
        except StopIteration:
            self.ended, self._items = True, None
            raise

    def _add_safely(self, iterator: Iterator[Any], items: list[Any]) -> None:
        """Add an item, in a thread to which interrupts come."""
        before = len(items)
        try:
            items.extend(map(next, (iterator,)))  # in one call, behind which nothing can be lost
        except BaseException as exc:
            if is_interrupt(exc) and len(items) == before and getattr(iterator, "gi_frame", self) is None:
                # It came in the middle of a generator, which has ended by that, as generators do.
                self.is_cut_short = self.ended = True
                self._error = exc
            raise
        if len(items) == before:
            raise StopIteration

    def _begun(self) -> Iterator[Any]:
        dataset, saved = self._context.dataset, self._saved
        HERE.set([self._context, 0, Stage.BEGIN, self._worker, None])
        with self.start.lock:
            if "dataset" in saved:
                dataset.load_state_dict(copy.deepcopy(saved["dataset"]))
            items: Iterator[Any] = iter(dataset)
            if items is dataset and self._worker is not None and self._context.num_workers == 1:
                items = iter(_fresh(items))  # where there are several lanes, it is a copy already
            if "iterator" in saved:
                if not has_state(items):
                    message = (
                        f"The state holds one of an iterator over the dataset, and {type(items).__name__} has no "
                        "load_state_dict. Give it the dataset that it had when the state was saved."
                    )
                    raise StateError(message)
                items.load_state_dict(copy.deepcopy(saved["iterator"]))  # type: ignore[attr-defined]
            self.start.known = self._mark_of(items, self.position)
        num_items, num_again = saved.get("num_items", 0), saved.get("num_again", 0)
        if "dataset" not in saved and "iterator" not in saved:
            items = self._passed_over(items, 0, num_items, list(saved.get("errors", ())))
        elif num_again:
            items = self._passed_over(items, num_items - num_again, num_items, [])
        HERE.set([self._context, num_items, _ITEM, self._worker, None])
        return items

    def _passed_over(self, items: Iterator[Any], position: int, num_items: int, errors: list[int]) -> Iterator[Any]:
        """Return ``items`` behind what was handed out: ``num_items`` in all, and the errors, if they come again."""
        while position < num_items or errors:
            HERE.set([self._context, position, _ITEM, self._worker, None])
            try:
                item = next(items)
            except StopIteration:
                if position == num_items:
                    break
                message = (
                    f"The state was saved after {num_items} items, and the dataset has only {position} now. Give it "
                    "the data that it had then."
                )
                raise StateError(message) from None
            except BaseException as exc:
                if is_interrupt(exc) or position not in errors:
                    raise
                errors.remove(position)
                continue
            if position == num_items:  # in place of an error
                return itertools.chain([item], items)
            position += 1
            errors = [each for each in errors if each >= position]
        return items

    def _mark(self, position: int) -> dict[str, Any]:
        mark = self._latest = self._mark_of(self._items, position) | {"ended": self.ended and not self.is_cut_short}
        return mark

    def _mark_before_error(self, position: int, num_again: int) -> dict[str, Any]:
        """Return a mark from which the error, of which the dataset's own state is behind, comes again."""
        mark, before = self._mark_of(self._items, position), self._latest or self.start.known
        if "iterator" not in mark and "dataset" not in mark:
            return mark | {"ended": self.ended and not self.is_cut_short}
        kept = {name: before[name] for name in ("iterator", "dataset") if name in before}
        return {"num_items": position, **kept, "num_again": before.get("num_again", 0) + num_again}

    def _mark_of(self, items: Iterator[Any] | None, position: int) -> dict[str, Any]:
        mark: dict[str, Any] = {"num_items": position}
        if items is not None and has_state(items):
            mark["iterator"] = copy.deepcopy(items.state_dict())  # type: ignore[attr-defined]
        elif has_state(self._context.dataset):
            mark["dataset"] = copy.deepcopy(self._context.dataset.state_dict())
        elif self._errors:
            mark["errors"] = list(self._errors)
        return mark


class Items:
    """The lanes of one pass over an iterable dataset, taken in turns, as torch takes its workers.

    Args:
        context: What the dataset's code is told of the pass.
        num_lanes: Iterators; where there are several, each goes over a copy of the dataset, as a dataset may keep its
            place or its part in itself.
        threaded: Whether they are worked on by threads, and so are workers to the dataset.
        worker_init_fn: Called here with the number of each lane.
        in_order: Whether lanes take turns strictly, or one that is busy is passed over.
        saved: Where the lanes were, by their state.

    Raises:
        DatasetError: The dataset cannot be copied.
    """

    def __init__(
        self,
        context: PassContext,
        *,
        num_lanes: int,
        threaded: bool,
        worker_init_fn: Callable[[int], None] | None,
        in_order: bool,
        saved: Mapping[str, Any] | None,
    ) -> None:
        at_start = lanes_at_start(context.dataset, num_lanes)
        saved_lanes = (saved or {}).get("lanes", [{}] * num_lanes)
        self.lock = threading.Lock()  # for giving out turns
        self.expected: dict[int, Any] = {}
        """Batches that have not been given a lane, by their numbers, in that order."""
        self._latest_expected: Any = None
        self.lanes: list[Lane] = [
            Lane(
                number,
                context if num_lanes == 1 else replace(context, dataset=_copy_of(context.dataset)),
                number if threaded or num_lanes > 1 else None,
                threaded=threaded,
                saved=saved_lane,
            )
            for number, saved_lane in enumerate(saved_lanes)
        ]
        self.progress = [
            Progress(lane.get("num_done", 0), from_ranges(lane.get("ahead", ())), lane or start or None)
            for lane, start in zip(saved_lanes, at_start, strict=True)
        ]
        self.latest_lane: int = (saved or {}).get("latest_lane", -1)
        self._in_order = in_order
        self._turn = (self.latest_lane + 1) % num_lanes
        if worker_init_fn is not None:
            for lane in self.lanes:
                lane.initialise(worker_init_fn)

    def expect(self, batch: Any) -> None:
        """Have a batch be given a turn behind those that came before; the latest may come again, and has one."""
        with self.lock:
            if batch is not self._latest_expected:
                self.expected[batch.number] = self._latest_expected = batch  # both, or none where an interrupt comes

    def next_lane(self) -> Lane | None:
        """Return the lane whose turn it is, of those that have not ended; ``None`` if all have."""
        by_turns = self.lanes[self._turn :] + self.lanes[: self._turn]
        left = [lane for lane in by_turns if not lane.is_empty]
        if not left:
            return None
        free = [] if self._in_order else [lane for lane in left if not lane.expected and not lane.lock.locked()]
        lane = (free or left)[0]
        self._turn = (lane.number + 1) % len(self.lanes)
        return lane

    def give_back(self, lane: Lane) -> None:
        """Have a lane that was interrupted be the next one again."""
        self._turn = lane.number


def lanes_at_start(dataset: Any, num_lanes: int) -> list[dict[str, Any]]:
    """Return, for JSON, what lanes need to begin as they would now, in a pass that has not begun."""
    if not has_state(dataset):
        return [{}] * num_lanes
    return [{"dataset": copy.deepcopy(dataset.state_dict())} for _ in range(num_lanes)]


def lane_states(lanes: Sequence[Progress], starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Return, for JSON, what lanes need to go on behind what has been handed out."""
    states = []
    for progress, start in zip(lanes, starts, strict=True):
        state = dict(progress.mark or start.mark())
        state.pop("ahead", None)
        if progress.done:
            state["num_done"] = progress.done
        if progress.ahead:
            state["ahead"] = as_ranges(progress.ahead)
        states.append(copy.deepcopy(state))
    return states


def _fresh(dataset: Iterator[Any]) -> Iterator[Any]:
    """Return a copy of a dataset that is its own iterator, and would have ended for good after one pass."""
    try:
        return copy.deepcopy(dataset)
    except Exception:  # then it is passed over once, as without threads
        return dataset


def _copy_of(dataset: Any) -> Any:
    try:
        return copy.deepcopy(dataset)
    except Exception as exc:
        message = (
            f"With iterable_workers above 1 each worker goes over a copy of the dataset, and {type(dataset).__name__} "
            f"cannot be copied: {text_of(exc)}. Give it a __deepcopy__, or leave iterable_workers out."
        )
        raise DatasetError(message) from exc
