"""Delivery: batches that many threads finish at once arrive each once, and in order."""

import random
import threading
from typing import Any

import pytest

from aioload.engine.delivery import Delivery
from aioload.engine.handoff import Handoff


class Finished:
    """What a delivery looks at in a batch."""

    is_empty = False
    error = None

    def __init__(self, number: int) -> None:
        self.number = number
        self.discarded = False

    def discard(self) -> None:
        self.discarded = True


def taken(handoff: Handoff) -> list[int]:
    numbers = []
    while (batch := handoff.peek()) is not None:
        numbers.append(batch.number)
        handoff.pop(batch)
    return numbers


def arrive_all(delivery: Delivery, batches: list[Any], *, num_threads: int) -> None:
    barrier = threading.Barrier(num_threads)

    def bring(mine: list[Any]) -> None:
        barrier.wait(60)
        for batch in mine:
            delivery.arrive(batch)

    threads = [threading.Thread(target=bring, args=(batches[n::num_threads],)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("in_order", [True, False])
def test_threads_that_finish_batches_at_once_lose_none_and_repeat_none(in_order: bool) -> None:
    for seed in range(20):
        handoff = Handoff()
        batches: list[Any] = [Finished(number) for number in range(500)]
        random.Random(seed).shuffle(batches)
        arrive_all(Delivery(handoff, None, in_order=in_order), batches, num_threads=8)
        numbers = taken(handoff)
        assert (numbers if in_order else sorted(numbers)) == list(range(500))


def test_a_batch_that_arrives_in_the_middle_of_another_ones_arrival_is_handed_over_too() -> None:
    class Interrupted(Handoff):
        """As if a garbage collection ran a finalizer that finishes a batch."""

        def put(self, batch: Any) -> None:
            if batch.number == 0:
                delivery.arrive(Finished(2))  # type: ignore[arg-type]
                delivery.arrive(Finished(1))  # type: ignore[arg-type]
            super().put(batch)

    handoff = Interrupted()
    delivery = Delivery(handoff, None, in_order=True)
    delivery.arrive(Finished(0))  # type: ignore[arg-type]
    assert taken(handoff) == [0, 1, 2]


def test_what_arrives_after_the_end_is_discarded() -> None:
    handoff, late = Handoff(), Finished(0)
    delivery = Delivery(handoff, None, in_order=True)
    delivery.closed = True
    delivery.arrive(late)  # type: ignore[arg-type]
    assert late.discarded
    assert taken(handoff) == []


def test_a_batch_that_is_made_again_when_it_has_left_is_not_kept() -> None:
    handoff = Handoff()
    delivery = Delivery(handoff, None, in_order=True)
    for number in (0, 0, 1):  # the second by an interrupt
        delivery.arrive(Finished(number))  # type: ignore[arg-type]
    assert taken(handoff) == [0, 1]
    assert delivery._order._waiting == {}  # type: ignore[union-attr]
