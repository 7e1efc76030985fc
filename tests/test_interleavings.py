"""Batches on a device, in whatever order consumer, copier, ring and device come to their turn.

No byte that the consumer's stream reads is stale or torn, nothing leaks, nobody waits for ever, and slots are few. What
would find a copier that does not keep to this is shown to find some that do not.
"""

import asyncio
import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from structures import MyTensor

from aioload import DataLoader, TensorDataset
from aioload.bundle import bundle
from aioload.copier import Copied, Copier
from aioload.device import Event, Stream
from aioload.engine import runtime
from aioload.layout import Layout
from aioload.ring import Ring
from aioload.slot import Slot
from aioload.structure import map_tensors
from aioload.testing import Reading, SimulatedDevice, SimulatedStream

POISON = 0xDB
SLOT_BYTES = 4096
"""The least that a slot has."""


class ReusesAtOnce(Copier):
    """Gives a slot back as soon as its copy has been issued."""

    def _release_behind(self, slot: Slot, stream: Stream) -> Event:
        event = self._backend.record_event(stream)
        self.ring.release(slot)
        return event


class MarksTooEarly(Copier):
    """Has an event from before the copy."""

    def _copy_arena(self, slot: Slot, num_bytes: int, stream: Stream) -> tuple[torch.Tensor, Event]:
        self._early = self._backend.record_event(stream)
        return super()._copy_arena(slot, num_bytes, stream)

    def _release_behind(self, slot: Slot, stream: Stream) -> Event:
        self.ring.release_behind(slot, self._early)
        return self._early


class DoesNotWait(Copier):
    """Gives a batch to the consumer whose stream does not wait for it."""

    def receive(self, copied: Copied) -> Any:
        current = self._backend.current_stream()
        for piece in copied.pieces:
            self._backend.record_stream(piece, current)
        return copied.value


class DoesNotGuard(Copier):
    """Does not tell the allocator who uses the memory."""

    def receive(self, copied: Copied) -> Any:
        self._backend.wait_event(self._backend.current_stream(), copied.event)
        return copied.value


class DoesNotGuardResults(Copier):
    """Tells the allocator who uses what was copied, and not who uses what was made of it."""

    def transform(self, copied: Copied) -> Copied:
        return dataclasses.replace(super().transform(copied), pieces=copied.pieces)


class LosesSlots(Copier):
    """Never gives one back."""

    def _release_behind(self, slot: Slot, stream: Stream) -> Event:
        self.ring._copying.append((slot, NEVER))
        return self._backend.record_event(stream)


class Never:
    """An event that never passes."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise NotImplementedError


NEVER = Never()


class Stale(AssertionError):
    """The consumer's stream has read something else than what was loaded."""


BROKEN = [ReusesAtOnce, MarksTooEarly, DoesNotWait, DoesNotGuard]


def leaves_of(batch: Any) -> list[torch.Tensor]:
    return list(batch.values())


class CopierMachine(RuleBasedStateMachine):
    """A copier between a ring and a device that does each thing when it is told to."""

    kind: type[Copier] = Copier

    def __init__(self) -> None:
        super().__init__()
        self.device = SimulatedDevice()
        self.ring = Ring(new_memory=self.device.host_memory, max_free=2, poison=POISON)
        self.copier = self.kind(self.device, self.ring)
        self.streams = [self.device.default_stream, self.device.new_stream()]  # the consumer's
        layout = Layout.of({"bytes": np.zeros(7, np.uint8), "number": 0})
        assert layout is not None
        self.layout = layout
        self.number = 0
        self.issued: deque[tuple[Copied, int]] = deque()
        self.held: list[tuple[Any, int, SimulatedStream]] = []
        self.readings: list[tuple[Reading, int]] = []

    @rule(num_rows=st.integers(1, 3), call=st.sampled_from([None, None, None, "copy", "copied", "record_event"]))
    def issue(self, num_rows: int, call: str | None) -> None:
        self.number = number = self.number % 200 + 1
        slot = self.ring.acquire(self.layout.offsets(num_rows)[1])
        # Of those that have been copied from an event, or else a copy, is still to come; there are free ones; and this.
        num_pending = sum(len(stream.pending) for stream in self.device.streams[2:])
        assert self.device.host_bytes <= (num_pending + self.ring.max_free + 1) * SLOT_BYTES
        columns = self.layout.columns(slot.arena, num_rows)
        for row in range(num_rows):
            assert self.layout.write(columns, row, [{"bytes": np.full(7, number, np.uint8), "number": number}])
        slot.seal()
        if call is None:
            self.issued.append((self.copier.copy_slot(slot, self.layout, columns, num_rows), number))
            return
        self.device.fail(call, MemoryError())
        with pytest.raises(MemoryError):
            self.copier.copy_slot(slot, self.layout, columns, num_rows)

    @rule()
    def issue_what_is_in_no_slot(self) -> None:
        self.number = number = self.number % 200 + 1
        tensors = {"bytes": torch.full((5, 3), number, dtype=torch.uint8), "number": torch.tensor(number)}
        self.issued.append((self.copier.copy(tensors), number))
        for tensor in tensors.values():
            tensor.fill_(0)  # it was no memory of the device's host side

    @rule()
    def issue_what_was_brought_together(self) -> None:
        self.number = number = self.number % 200 + 1
        tensors = {"bytes": torch.full((5, 3), number, dtype=torch.uint8), "number": torch.tensor(number)}
        found = bundle(tensors, self.ring)
        assert found is not None
        bundled, slot = found
        self.issued.append((self.copier.copy_bundle(slot, bundled), number))

    @rule(stream=st.integers(0, 1), hold=st.booleans())
    def receive(self, stream: int, hold: bool) -> None:
        if self.issued:
            copied, number = self.issued.popleft()
            with self.device.stream(self.streams[stream]):
                self.held.append((self.copier.receive(copied), number, self.streams[stream]))
            self.read(-1)
            if not hold:
                self.held.pop()

    @rule(place=st.integers(0, 5))
    def read(self, place: int) -> None:
        if self.held:
            batch, number, stream = self.held[place % len(self.held)]
            with self.device.stream(stream):
                self.readings.extend((self.device.read(leaf), number) for leaf in leaves_of(batch))

    @rule(place=st.integers(0, 5))
    def drop(self, place: int) -> None:
        if self.held:
            del self.held[place % len(self.held)]

    @rule()
    def drop_what_was_not_received(self) -> None:
        if self.issued:
            self.issued.popleft()

    @rule(stream=st.sampled_from([0, 1, 2, 2]), count=st.integers(1, 6))
    def go_on(self, stream: int, count: int) -> None:
        for _ in range(count):
            self.device.step(self.device.streams[stream % len(self.device.streams)])

    @invariant()
    def what_was_read_is_what_was_loaded(self) -> None:
        for reading, number in self.readings:
            if reading.is_done and set(reading.value.flatten().tolist()) != {number}:
                raise Stale(reading.value, number)
        self.readings = [each for each in self.readings if not each[0].is_done]

    def teardown(self) -> None:
        self.device.run()
        self.what_was_read_is_what_was_loaded()
        assert not self.readings
        self.held.clear()
        self.issued.clear()
        self.ring.release(self.ring.acquire(1))
        assert self.ring.num_copying == 0
        assert len(self.ring._free) <= self.ring.max_free
        self.device.run()
        assert self.device.num_blocks_in_use == 0
        super().teardown()


def run_machine(kind: type[Copier], **more: Any) -> None:
    class Machine(CopierMachine):
        pass

    Machine.kind = kind
    chosen = {"max_examples": 100, "stateful_step_count": 40, **more}
    run_state_machine_as_test(Machine, settings=settings(deadline=None, derandomize=True, database=None, **chosen))


def test_in_whatever_order_nothing_is_stale_or_lost() -> None:
    run_machine(Copier)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_copier_that_is_broken_is_found_out(kind: type[Copier]) -> None:
    with pytest.raises(Stale):
        run_machine(kind, phases=[Phase.generate])


def test_a_copier_that_loses_slots_is_found_out() -> None:
    with pytest.raises(AssertionError, match=r"host_bytes|num_copying"):
        run_machine(LosesSlots, phases=[Phase.generate])


def pair(index: int) -> dict[str, Any]:
    return {"bytes": np.full(7, index, np.uint8), "number": index}


class Awaited:
    """Samples that are awaited."""

    def __len__(self) -> int:
        return 40

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return pair(index)


def collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def collate_subclass(samples: list[Any]) -> Any:
    batch = collate(samples)
    return {**batch, "bytes": batch["bytes"].as_subclass(MyTensor)}


SAMPLES = [pair(index) for index in range(40)]
DATASETS: dict[str, Any] = {
    "samples": (SAMPLES, {}),
    "awaited": (Awaited(), {}),
    "tensors": (TensorDataset(torch.arange(40, dtype=torch.uint8).repeat(7, 1).T, torch.arange(40)), {}),
    "collated": (SAMPLES, {"collate_fn": collate}),
    "collated, not all plain": (SAMPLES, {"collate_fn": collate_subclass}),
}


class Consumer:
    """Takes batches of 4, in order, reads and holds them, and knows what they must be, if ``added`` was added."""

    def __init__(self, device: SimulatedDevice, choose: random.Random, *, added: int = 0) -> None:
        self.device, self._choose, self._added = device, choose, added
        self.streams = [device.default_stream, device.new_stream()]
        self._held: deque[tuple[list[torch.Tensor], int]] = deque()
        self._readings: list[tuple[Reading, int]] = []

    def take(self, batch: Any, number: int) -> None:
        """Read a batch on the current stream, and hold it, perhaps; read one that is held, and drop others."""
        leaves = list(batch.values()) if isinstance(batch, dict) else list(batch)
        self._read(leaves, number)
        self._held.append((leaves, number))
        if self._choose.random() < 0.5:
            self._read(*self._choose.choice(self._held))
        while len(self._held) > self._choose.randrange(6):
            self._held.popleft()

    def _read(self, leaves: list[torch.Tensor], number: int) -> None:
        self._readings.extend((self.device.read(leaf), number) for leaf in leaves)

    def check(self) -> None:
        """Let the device finish, and see that all that was read is what was loaded."""
        self._held.clear()
        self.device.run()
        for reading, number in self._readings:
            rows = torch.arange(number * 4, number * 4 + 4)[:, None] + self._added
            if not (reading.value.reshape(4, -1) == rows).all():
                raise Stale(reading.value, number)


ways = st.fixed_dictionaries(
    {
        "num_workers": st.sampled_from([0, 1, 3]),
        "num_device_batches": st.integers(1, 3),
        "prefetch_factor": st.integers(1, 3),
        "persistent": st.booleans(),
        "transforms": st.booleans(),
        "awaits": st.booleans(),
        "dataset": st.sampled_from(sorted(DATASETS)),
        "num_taken": st.lists(st.integers(0, 10), min_size=1, max_size=3),
    }
)


@given(seed=st.integers(0, 1 << 32), way=ways)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_through_a_loader_nothing_is_stale_or_lost_either(seed: int, way: dict[str, Any]) -> None:
    device, choose = SimulatedDevice(pace=random.Random(seed)), random.Random(seed)
    consumer = Consumer(device, choose, added=int(way["transforms"]))
    dataset, arguments = DATASETS[way["dataset"]]
    num_workers = way["num_workers"]
    if num_workers > 0:
        arguments = {**arguments, "prefetch_factor": way["prefetch_factor"], "persistent_workers": way["persistent"]}
    loader: DataLoader[Any] = DataLoader(
        dataset,
        4,
        num_workers=num_workers,
        num_concurrent_reads=4,
        num_device_batches=way["num_device_batches"],
        device=device,
        device_transform=adding_one(device) if way["transforms"] else None,
        **arguments,
    )
    ring = loader._runtime().ring
    ring.poison = POISON
    with loader, device.stream(choose.choice(consumer.streams)):
        for num_taken in way["num_taken"]:
            if way["awaits"]:
                asyncio.run(take_awaiting(loader, consumer, num_taken))
            else:
                for number, batch in zip(range(num_taken), loader, strict=False):
                    consumer.take(batch, number)
                    del batch
    if num_workers > 0 and not way["persistent"]:
        num_copies = 2 if way["dataset"] == "collated, not all plain" else 1  # for each batch
        assert device.max_copying <= num_copies * way["num_device_batches"] * len(way["num_taken"])
    consumer.check()
    ring.release(ring.acquire(1))
    assert ring.num_copying == 0
    device.run()
    assert device.num_blocks_in_use == 0


def adding_one(device: SimulatedDevice) -> Callable[[Any], Any]:
    """Return a transform that adds 1 to all there is in a batch, as two kernels."""

    def add(tensor: torch.Tensor) -> torch.Tensor:
        return device.launch(lambda twice: twice - 7, device.launch(lambda value: value + 8, tensor))

    return lambda batch: map_tensors(batch, add)


async def take_awaiting(loader: DataLoader[Any], consumer: Consumer, num_taken: int) -> None:
    async with loader:
        batches = aiter(loader)
        for number in range(num_taken):
            consumer.take(await anext(batches), number)
        await batches.aclose()


def take_all(device: SimulatedDevice, *, num_device_batches: int, transforms: bool = False) -> None:
    """Take all batches; copies are done when one has been taken, and what reads them up to two batches later.

    Where two may be under way, the last thing on the copier's stream is left for later.
    """
    consumer = Consumer(device, random.Random(0), added=int(transforms))
    samples = [pair(index) for index in range(200)]
    loader: DataLoader[Any] = DataLoader(
        samples,
        4,
        num_workers=2,
        num_device_batches=num_device_batches,
        device=device,
        device_transform=adding_one(device) if transforms else None,
    )
    with device, loader:
        ring = loader._runtime().ring
        ring.poison = POISON
        for number, batch in enumerate(loader):
            consumer.take(batch, number)
            del batch
            ring.release(ring.acquire(1))  # has it look which slots are free by now
            if number % 3 == 0:
                device.run(device.default_stream)
            for stream in device.streams[1:]:
                while len(stream.pending) > (num_device_batches > 1):
                    assert device.step(stream)
        consumer.check()


def test_a_loader_takes_few_slots_and_little_device_memory_however_far_the_consumer_is_behind() -> None:
    for num_device_batches in (1, 2, 3):
        device = SimulatedDevice()
        take_all(device, num_device_batches=num_device_batches)
        assert device.max_copying <= num_device_batches
        assert device.max_host_bytes <= (2 * 2 + num_device_batches + 1) * SLOT_BYTES
        assert device.num_blocks <= 6 + 3 + num_device_batches  # that are held, or were and wait for a kernel


@pytest.mark.parametrize("kind", BROKEN)
def test_a_loader_with_a_copier_that_is_broken_is_found_out(
    kind: type[Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "Copier", kind)
    with pytest.raises(Stale):
        take_all(SimulatedDevice(), num_device_batches=2)


def test_what_a_transform_has_made_is_guarded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all(SimulatedDevice(), num_device_batches=2, transforms=True)
    monkeypatch.setattr(runtime, "Copier", DoesNotGuardResults)
    with pytest.raises(Stale):
        take_all(SimulatedDevice(), num_device_batches=2, transforms=True)
