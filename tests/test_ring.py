"""A slot has one owner at a time, and its bytes stay as they are while anything of the consumer's refers to them."""

import contextlib
import gc
import itertools
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from interrupting import InterruptedAt

from aioload.layout import ALIGNMENT
from aioload.ring import Ring
from aioload.slot import Slot, SlotState

POISON = 0xDB


def cycle_of(view: Any) -> list[Any]:
    cycle = [view]
    cycle.append(cycle)
    return cycle


DERIVATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda view: view.numpy(),
    "slice": lambda view: view[1:],
    "every other": lambda view: view[::2],
    "other dtype": lambda view: view[:64].view(torch.int16),
    "other dtype of numpy": lambda view: view.numpy()[:64].view(np.complex64),
    "transposed": lambda view: view[:64].reshape(2, 32).T,
    "detached": lambda view: view.detach(),
    "there and back": lambda view: torch.from_numpy(view.numpy()),
    "dlpack to numpy": np.from_dlpack,
    "dlpack to torch": torch.utils.dlpack.from_dlpack,
    "dlpack capsule": lambda view: view.__dlpack__(),
    "memoryview": lambda view: view.numpy().data,
    "buffer": lambda view: torch.frombuffer(view.numpy().data, dtype=torch.uint8),
    "storage": lambda view: view.untyped_storage(),
    "closure": lambda view: lambda: view,
    "iterator": lambda view: iter(view.numpy()),
    "cycle": cycle_of,
    "saved for backward": lambda view: torch.ones(8, requires_grad=True) * view[:8],
}


class Lent:
    """What the consumer holds of a slot: some views, and how the slot's bytes were when it last wrote to them."""

    def __init__(self, slot: Slot, view: torch.Tensor) -> None:
        self.slot, self.views = slot, list[Any]([view])
        self.contents = slot.arena.copy()

    def sources(self) -> list[torch.Tensor]:
        """Return the views from which others can be made."""
        return [
            view
            for view in self.views
            if isinstance(view, torch.Tensor) and view.dtype is torch.uint8 and view.is_contiguous()
        ]


class Flag:
    """An event."""

    has_passed = False

    def query(self) -> bool:
        return self.has_passed


class RingMachine(RuleBasedStateMachine):
    """Every slot is in one place at a time, and holds what its owner last wrote."""

    filling = Bundle("filling")
    ready = Bundle("ready")

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(max_free=3, poison=POISON)
        self.owned: dict[Slot, np.ndarray[Any, Any]] = {}  # FILLING and READY, with their contents
        self.held: list[Lent] = []
        self.copying: deque[tuple[Slot, Flag, np.ndarray[Any, Any]]] = deque()

    @rule(target=filling, num_bytes=st.sampled_from([0, 1, 4096, 4097, 9000, 20_000]), byte=st.integers(0, 255))
    def acquire(self, num_bytes: int, byte: int) -> Slot:
        slot = self.ring.acquire(num_bytes)
        assert slot.state is SlotState.FILLING
        assert slot.arena.nbytes >= num_bytes
        assert slot.arena.ctypes.data % ALIGNMENT == 0
        assert slot not in self.owned
        slot.arena.fill(byte)
        self.owned[slot] = slot.arena.copy()
        return slot

    @rule(target=ready, slot=consumes(filling))
    def seal(self, slot: Slot) -> Slot:
        slot.seal()
        assert slot.state is SlotState.READY
        return slot

    @rule(slot=st.one_of(consumes(filling), consumes(ready)))
    def release(self, slot: Slot) -> None:
        self.ring.release(slot)
        assert slot.state in (SlotState.FREE, SlotState.DROPPED)
        del self.owned[slot]

    @rule(slot=consumes(ready))
    def lend(self, slot: Slot) -> None:
        view = self.ring.lend(slot)(torch.uint8, 4096, 0)
        assert slot.state is SlotState.LENT
        del self.owned[slot]
        self.held.append(Lent(slot, view))

    @rule(slot=consumes(ready))
    def release_behind(self, slot: Slot) -> None:
        event = Flag()
        self.ring.release_behind(slot, event)
        assert slot.state is SlotState.COPYING
        self.copying.append((slot, event, self.owned.pop(slot)))

    @rule()
    def pass_event(self) -> None:
        if self.copying:
            self.copying.popleft()[1].has_passed = True

    @rule(data=st.data(), name=st.sampled_from(sorted(DERIVATIONS)))
    def derive(self, data: st.DataObject, name: str) -> None:
        lent = data.draw(st.sampled_from(self.held)) if self.held else None
        if lent is not None and lent.sources():
            lent.views.append(DERIVATIONS[name](data.draw(st.sampled_from(lent.sources()))))

    @rule(data=st.data(), byte=st.integers(0, 255))
    def write(self, data: st.DataObject, byte: int) -> None:
        lent = data.draw(st.sampled_from(self.held)) if self.held else None
        if lent is not None and lent.sources():
            lent.sources()[0].fill_(byte)
            lent.contents = lent.slot.arena.copy()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.held:
            lent = data.draw(st.sampled_from(self.held))
            del lent.views[data.draw(st.integers(0, len(lent.views) - 1))]
            if not lent.views:
                self.held.remove(lent)
            gc.collect()

    @invariant()
    def slots_are_lent_while_they_can_be_seen(self) -> None:
        assert self.ring.num_lent == len(self.held)

    @invariant()
    def slots_are_copying_until_their_event_has_passed(self) -> None:
        assert [slot.state for slot, _, _ in self.copying] == [SlotState.COPYING] * len(self.copying)
        assert self.ring.num_copying >= len(self.copying)

    @invariant()
    def nobody_else_writes(self) -> None:
        lent = [(lent.slot, lent.contents) for lent in self.held]
        copying = [(slot, contents) for slot, _, contents in self.copying]
        for slot, contents in [*self.owned.items(), *lent, *copying]:
            assert np.array_equal(slot.arena, contents)

    @invariant()
    def free_slots_are_few_and_poisoned(self) -> None:
        assert len(self.ring._free) <= self.ring.max_free
        for slot in self.ring._free:
            assert slot.state is SlotState.FREE
            assert (slot.arena == POISON).all()

    @invariant()
    def no_byte_has_two_owners(self) -> None:
        slots = [*self.owned, *(lent.slot for lent in self.held), *(each[0] for each in self.copying), *self.ring._free]
        spans = sorted((slot.arena.ctypes.data, slot.arena.nbytes) for slot in slots)
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestRing = RingMachine.TestCase


def lend(ring: Ring, num_bytes: int = 4096, byte: int = 0) -> torch.Tensor:
    """Return the consumer's only view of a new slot's bytes."""
    slot = ring.acquire(num_bytes)
    slot.arena.fill(byte)
    slot.seal()
    return ring.lend(slot)(torch.uint8, num_bytes, 0)


@pytest.mark.parametrize("derive", DERIVATIONS.values(), ids=DERIVATIONS.keys())
def test_a_slot_comes_back_when_the_last_view_is_gone(derive: Callable[[torch.Tensor], Any]) -> None:
    ring = Ring(poison=POISON)
    view = lend(ring, byte=1)
    address = view.data_ptr()
    derived = derive(view)
    del view
    gc.collect()
    assert ring.num_lent == 1
    other = ring.acquire(4096)
    assert other.arena.ctypes.data != address
    ring.release(other)
    del derived
    gc.collect()
    assert ring.num_lent == 0
    assert address in {lend(ring, byte=2).data_ptr(), ring.acquire(4096).arena.ctypes.data}


def test_the_function_that_gives_out_views_holds_the_slot_too() -> None:
    ring = Ring()
    slot = ring.acquire(4096)
    slot.seal()
    view = ring.lend(slot)
    assert ring.num_lent == 1
    assert repr(slot).startswith("<Slot lent 4096 bytes at 0x")
    del view
    assert ring.num_lent == 0


def test_views_are_of_the_dtype_and_place_asked_for() -> None:
    ring = Ring()
    slot = ring.acquire(4096)
    slot.arena[64:72].view(np.float32)[:] = [1.5, -2]
    slot.seal()
    view = ring.lend(slot)
    numbers = view(torch.float32, 2, 64)
    assert numbers.tolist() == [1.5, -2]
    assert numbers.untyped_storage().nbytes() == 8  # saved alone, it takes no more
    assert view(torch.bfloat16, 1, 4094).shape == (1,)


def test_the_smallest_free_slot_that_fits_is_taken() -> None:
    ring = Ring(max_free=3)
    slots = {size: ring.acquire(size) for size in (9000, 5000, 20_000)}
    for slot in slots.values():
        ring.release(slot)
    assert ring.acquire(6000) is slots[9000]
    assert ring.acquire(6000) is slots[20_000]
    assert ring.acquire(6000) is not slots[5000]


def test_slots_that_have_become_too_small_make_room() -> None:
    ring = Ring(max_free=2)
    for size in (5000, 9000, 20_000, 40_000, 80_000):
        slots = [ring.acquire(size) for _ in range(3)]
        for slot in slots:
            ring.release(slot)
    assert [slot.arena.nbytes for slot in ring._free] == [80_000, 80_000]


def test_holding_makes_the_ring_grow_and_warns_once() -> None:
    ring = Ring(max_free=2, warn_held=5, warn_held_bytes=5 * 4096)
    held = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(20):
            held.append(lend(ring, byte=number))
            ring.warn_if_held()
    assert [str(each.message)[:22] for each in caught] == ["5 batches (0 MB) are s"]
    assert caught[0].category is RuntimeWarning
    assert [set(view.tolist()) for view in held] == [{number} for number in range(20)]
    assert ring.max_held_seen == 5  # nobody needs to know more
    del held[:]
    assert lend(ring).any() == 0
    assert ring.num_lent == 0
    assert repr(ring) == "<Ring free=1 lent=0 copying=0>"  # and one that has not been taken in yet


def test_a_few_bytes_may_be_held_in_any_number_of_batches() -> None:
    ring = Ring(warn_held=5)
    held = []
    for _ in range(50):
        held.append(lend(ring))
        ring.warn_if_held()  # a warning is an error here
    assert ring.num_lent == 50


def test_without_reuse_every_batch_has_memory_of_its_own() -> None:
    ring = Ring(reuse=False, poison=POISON)
    held = [lend(ring, byte=number) for number in range(4)]
    assert len({view.data_ptr() for view in held}) == 4
    assert ring.num_lent == 4
    assert [set(view.tolist()) for view in held] == [{0}, {1}, {2}, {3}]
    del held[1:3]
    assert ring.num_lent == 2


def test_a_view_may_be_collected_while_the_ring_is_locked() -> None:
    ring = Ring()
    cycle: Any = cycle_of(lend(ring))
    with ring._lock:
        del cycle
        gc.collect()  # as inside any allocation of the ring's own
    assert ring.num_lent == 0
    ring.acquire(1)
    assert len(ring._free) == 0


def test_an_interrupt_loses_no_slot() -> None:
    for number in itertools.count(1):
        ring, interrupt = Ring(max_free=2), InterruptedAt(number)
        slots = [ring.acquire(100) for _ in range(3)]
        for slot in slots:
            slot.seal()
            ring.lend(slot)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            ring.take_in()
        ring.take_in()
        ring.trim(0)
        assert (repr(ring), ring.num_lent) == ("<Ring free=0 lent=0 copying=0>", 0)
        acquired = [ring.acquire(100) for _ in range(3)]
        assert len({slot.address for slot in acquired}) == 3
        if interrupt.num_places < number:
            break
    assert number > 10


def test_threads_never_share_a_slot() -> None:
    ring = Ring(max_free=4, poison=POISON)
    start, wrong = threading.Barrier(4), list[int]()

    def use(byte: int) -> None:
        held: deque[torch.Tensor] = deque(maxlen=3)
        start.wait()
        for number in range(300):
            slot = ring.acquire(64 * (number % 3))
            slot.arena[:64] = byte
            if number % 5 == 0:
                ring.release(slot)
                continue
            slot.seal()
            held.append(ring.lend(slot)(torch.uint8, 64, 0))
            wrong.extend(int(view[0]) for view in held if (view != byte).any())

    threads = [threading.Thread(target=use, args=(byte,)) for byte in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ring.num_lent == 0
    assert len(ring._free) <= 4
