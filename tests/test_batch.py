"""A batch under way is complete exactly once, as soon as what the consumer gets is certain."""

import itertools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from aioload.context import PassContext
from aioload.engine.batch import Batch, BatchState
from aioload.engine.recipe import Recipe
from aioload.errors import CollateError, ErrorContext
from aioload.ring import Ring
from aioload.slot import SlotState
from aioload.stats import Tally
from aioload.testing import Gates


def make_recipe(ring: Ring) -> Recipe:
    return Recipe(
        context=PassContext(None, 1, 0, None, 0),
        collate_fn=default_collate,
        batched=True,
        by_rows=True,
        on_device=False,
        pin=False,
        ring=ring,
        locate=lambda index: f"file {index}",
        on_size=lambda _: None,
        tolerance=None,
    )


def make_batch(size: int, recipe: Recipe | None = None) -> tuple[Batch, list[Batch]]:
    """Return a batch of the samples 10, 11 and so on, and where it will be when it is done."""
    done: list[Batch] = []
    return Batch(0, range(10, 10 + size), recipe or make_recipe(Ring()), done.append), done


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    """Return the positions of a batch in the order in which they come, and those of them that fail."""
    order = draw(st.permutations(range(draw(st.integers(1, 6)))))
    return order, draw(st.sets(st.sampled_from(order)))


@given(arrivals())
def test_a_batch_is_complete_once_when_all_up_to_the_first_failure_have_come(
    arrivals: tuple[list[int], set[int]],
) -> None:
    order, failing = arrivals
    batch, done = make_batch(len(order))
    errors = {position: ValueError(position) for position in failing}
    first = min(failing, default=len(order) - 1)
    needed = set(range(first + 1))
    was_complete = False
    for number, position in enumerate(order):
        if not batch.wants(position):
            complete = batch.drop(position)
        elif position in failing:
            complete = batch.fail(position, errors[position], "fetch")
        else:
            complete = batch.add(position, position)
        is_certain = needed <= set(order[: number + 1])
        assert complete == (is_certain and not was_complete)
        was_complete |= complete
        if complete:
            batch.finish(Tally())
    assert done == [batch]
    if failing:
        assert batch.error is errors[first]
        assert batch.context == ErrorContext(10 + first, f"file {10 + first}", "fetch")
    else:
        assert batch.result.tolist() == list(range(len(order)))


@given(arrivals(), st.integers(0, 5))
def test_a_slot_comes_back_whatever_becomes_of_the_batch(arrivals: tuple[list[int], set[int]], cancel_at: int) -> None:
    order, failing = arrivals
    ring = Ring()
    batch, _ = make_batch(len(order), make_recipe(ring))
    slots = []
    for number, position in enumerate(order):
        if number == cancel_at:
            batch.cancel()
        if not batch.wants(position):
            complete = batch.drop(position)
        elif position in failing:
            complete = batch.fail(position, ValueError(), "fetch")
        else:
            complete = batch.add(position, position)
        if batch.slot is not None and batch.slot not in slots:
            slots.append(batch.slot)
        if complete:
            batch.finish(Tally())
    batch.discard()
    assert all(slot.state in (SlotState.FREE, SlotState.LENT) for slot in slots)
    del batch
    ring.release(ring.acquire(1))  # takes in what was lent
    assert [slot.state for slot in slots] == [SlotState.FREE] * len(slots)


@dataclass
class Sample:
    """Cannot be looked into before the gate of its key is open."""

    value: Any
    gates = Gates(opened=True)
    key = ""

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            self.gates.pass_through(self.key)
        return object.__getattribute__(self, name)


def test_a_row_is_never_written_into_a_slot_that_is_about_to_be_dropped() -> None:
    recipe = make_recipe(Ring())
    before, _ = make_batch(2, recipe)
    for position in range(2):
        before.add(position, Sample(np.zeros(2)))  # the next batch tries this layout first
    batch, done = make_batch(2, recipe)
    odd, usual = Sample(np.ones(3)), Sample(np.ones(2))
    odd.gates = usual.gates = gates = Gates()
    odd.key, usual.key = "odd", "usual"

    def add(position: int, sample: Sample) -> None:
        if batch.add(position, sample):
            batch.finish(Tally())

    threads = [threading.Thread(target=add, args=arguments) for arguments in ((0, odd), (1, usual))]
    threads[0].start()
    gates.wait_started("odd")  # being written by a layout that it does not fit
    threads[1].start()
    gates.open("usual")  # fits, but must wait and see
    gates.open("odd")
    for thread in threads:
        thread.join()
    assert done == [batch]
    assert isinstance(batch.error, CollateError)
    assert "index 10 ('file 10') and index 11 ('file 11') differ" in str(batch.error)


@dataclass
class Closed:
    """Cannot be looked into."""

    value: int

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise object.__getattribute__(self, "error")
        return object.__getattribute__(self, name)


def test_a_sample_that_cannot_be_looked_into_fails_its_batch() -> None:
    for error in (LookupError("value"), SystemExit("value")):
        batch, done = make_batch(2)
        samples = [Closed(1), Closed(2)]
        for sample in samples:
            sample.error = error  # type: ignore[attr-defined]
        assert any(batch.add(position, sample) for position, sample in enumerate(samples))
        batch.finish(Tally())
        assert done == [batch]
        assert batch.error is error
        assert batch.context is not None
        assert batch.context.stage == "collate"


def test_a_batch_too_large_for_memory_fails_alone() -> None:
    batch, _ = make_batch(1)
    huge = np.broadcast_to(np.zeros(1), (1 << 44, 1 << 10))
    assert batch.add(0, huge)
    batch.finish(Tally())
    assert isinstance(batch.error, MemoryError)


def test_what_is_added_after_a_cancel_is_dropped() -> None:
    batch, done = make_batch(2)
    batch.add(0, 1)
    batch.cancel()
    assert (batch.state, batch.wants(1)) == (BatchState.CANCELLED, False)
    assert not batch.add(1, 2)
    assert done == []
    assert batch.slot is None


def test_samples_in_every_order_give_the_same_batch() -> None:
    samples = [torch.full((2,), value) for value in range(4)]
    for order in itertools.permutations(range(4)):
        batch, _ = make_batch(4)
        for position in order:
            if batch.add(position, samples[position]):
                batch.finish(Tally())
        assert torch.equal(batch.result, torch.stack(samples))
