"""Batches on a device: what is moved how, and on a CUDA device that nothing is lost or used too early."""

import collections
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from oracle import assert_same
from rigs import ON_CUDA, RIGS, Simulated
from structures import STRUCTURES, FixedMapping, FixedSequence, MyDict, OpenMapping, OpenSequence, Pair, grid, nested
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from aioload import DataLoader, TensorDataset
from aioload.copier import Copier
from aioload.device import resolve_device
from aioload.errors import ArgumentError
from aioload.layout import Layout
from aioload.ring import Ring
from aioload.slot import SlotState
from aioload.structure import map_tensors
from aioload.testing import SimulatedDevice

POISON = 0xDB


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any = 1


class Own:
    """A batch of the user's that can move itself, and wants to hear of the device alone."""

    def __init__(self, x: torch.Tensor, told: Sequence[Any] = ()) -> None:
        self.x, self.told = x, list(told)

    def to(self, device: Any) -> "Own":
        return Own(self.x.to(device), [*self.told, device])


def cuda(function: Any) -> Any:
    for mark in ON_CUDA:
        function = mark(function)
    return function


CONTAINERS: dict[str, Any] = {
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, "s"),
    "named tuple": lambda x: Pair(x, None),
    "dict": lambda x: {"x": x, 1: b"s"},
    "OrderedDict": lambda x: collections.OrderedDict(x=x),
    "Counter": lambda x: collections.Counter({"x": x}),
    "defaultdict": lambda x: collections.defaultdict(int, x=x),
    "dict subclass": lambda x: MyDict({"x": x}, origin="here"),
    "mapping": lambda x: FixedMapping({"x": x}),
    "open mapping": lambda x: OpenMapping({"x": x}),
    "sequence": lambda x: FixedSequence([x, 2]),
    "open sequence": lambda x: OpenSequence([x, 2]),
    "deque": lambda x: collections.deque([x]),
    "dataclass": lambda x: Record(x),
    "nested": lambda x: {"a": [Record((x, {"b": Pair(x, [x])}))]},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_every_tensor_is_mapped_and_its_container_stays_what_it_is(make: Any) -> None:
    value = make(torch.ones(2))
    assert_same(map_tensors(value, lambda tensor: tensor + 1), make(torch.ones(2) + 1))
    assert_same(value, make(torch.ones(2)))


def test_a_dataclass_keeps_what_is_in_no_field_of_it() -> None:
    record = Record(torch.ones(1))
    object.__setattr__(record, "extra", "kept")
    mapped = map_tensors(record, lambda tensor: tensor + 1)
    assert (mapped.x.item(), mapped.y, mapped.extra) == (2, 1, "kept")


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_what_does_not_change_is_not_copied(make: Any) -> None:
    for value in (make(torch.ones(2)), make("s"), make(np.ones(2)), make(bytearray(3))):
        assert map_tensors(value, lambda tensor: tensor) is value


def test_objects_that_move_themselves_are_not_looked_into() -> None:
    packed, own = pack_sequence([torch.ones(2), torch.ones(1)]), Own(torch.ones(2))
    value = {"packed": packed, "own": own, "x": torch.ones(1)}
    moved = map_tensors(value, lambda tensor: tensor.to("meta"))
    assert (moved["packed"], moved["own"], moved["x"].device.type) == (packed, own, "meta")
    moved = map_tensors(value, lambda tensor: tensor, lambda other: other.to("meta"))
    assert moved["own"].x.device.type == moved["packed"].data.device.type == "meta"
    assert moved["packed"].batch_sizes.device.type == "cpu"  # as it must be


class Elsewhere(SimulatedDevice):
    """A device whose tensors can be told from others."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")

    def copy(self, tensor: torch.Tensor, stream: Any = None) -> torch.Tensor:
        return tensor.to(self.device)


def test_all_of_a_batch_is_moved() -> None:
    batch = {"x": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "own": [Own(torch.ones(2))], "s": "s"}
    moved = Copier(Elsewhere(), Ring()).move(batch)
    assert moved["x"].device.type == moved["sparse"].device.type == moved["own"][0].x.device.type == "meta"
    assert moved["s"] == "s"


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Any:
    return request.param(random.Random(1))


def loader_on(rig: Any, dataset: Any, batch_size: int, **arguments: Any) -> DataLoader[Any]:
    """Return a loader of which every slot that is free holds nothing but poison."""
    device = rig.backend if isinstance(rig.backend, SimulatedDevice) else rig.backend.device
    loader: DataLoader[Any] = DataLoader(dataset, batch_size, device=device, **arguments)
    loader._runtime().ring.poison = POISON
    return loader


def at_home(rig: Any, value: Any) -> Any:
    """Return what is on the device when all is done there, on the CPU."""
    rig.finish()
    assert {device.type for device in devices_of(value)} <= {rig.backend.device.type}
    return map_tensors(value, lambda tensor: tensor.cpu(), lambda own: own.to("cpu"))


def devices_of(value: Any) -> list[torch.device]:
    devices: list[torch.device] = []
    map_tensors(value, lambda tensor: devices.append(tensor.device) or tensor)  # type: ignore[func-returns-value]
    return devices


# A Parameter on another device is no Parameter any more.
ELSEWHERE = ("meta device", "meta device in some", "quantized", "parameter")
ON_CPU = {name: make for name, make in STRUCTURES.items() if name not in ELSEWHERE}


@pytest.mark.parametrize("make", ON_CPU.values(), ids=ON_CPU.keys())
def test_a_batch_on_the_device_is_that_of_the_cpu(make: Any, rig: Any) -> None:
    class Made:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return make(index)

    ways = itertools.product([0, 1, 3], [None, list])  # on CUDA; what is simulated differs from it in none of them
    for num_workers, collate_fn in [(0, None), (1, None)] if isinstance(rig, Simulated) else ways:
        with (
            loader_on(rig, Made(), 2, num_workers=num_workers, collate_fn=collate_fn) as ours,
            DataLoader(Made(), 2, num_workers=0, collate_fn=collate_fn) as theirs,
        ):
            batches, expected = iter(ours), iter(theirs)
            for _ in range(3):
                assert_same(outcome(batches, lambda batch: at_home(rig, batch)), outcome(expected, lambda batch: batch))


def outcome(batches: Any, then: Any) -> Any:
    try:
        batch = next(batches)
    except Exception as exc:
        return exc
    return then(batch)


def test_the_leaves_of_a_batch_lie_in_one_piece_of_device_memory(rig: Any) -> None:
    samples = [{"image": grid(i).astype("f4"), "mask": torch.ones(3, dtype=torch.bool), "label": i} for i in range(8)]
    with loader_on(rig, samples, 4, num_workers=2) as loader:
        for batch in loader:
            assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1
            assert all(tensor.data_ptr() % 64 == 0 for tensor in batch.values())


def test_objects_of_the_users_are_moved_too(rig: Any) -> None:
    def collate(samples: list[int]) -> Any:
        rows = [torch.arange(float(4 - i)) for i in range(len(samples))]
        return {"packed": pack_sequence(rows), "own": Own(torch.tensor(samples)), "sparse": torch.eye(2).to_sparse()}

    device = rig.backend.device.type
    for num_workers in (0, 2):
        with loader_on(rig, range(4), 2, num_workers=num_workers, collate_fn=collate) as loader:
            for start, batch in zip((0, 2), loader, strict=True):
                assert isinstance(batch["packed"], PackedSequence)
                assert batch["packed"].data.device.type == batch["own"].x.device.type == device
                assert batch["packed"].batch_sizes.device.type == "cpu"
                assert batch["own"].x.tolist() == [start, start + 1]
                assert batch["own"].told == [rig.backend.device]
                assert batch["sparse"].device.type == device
                assert torch.equal(batch["sparse"].to_dense().cpu(), torch.eye(2))


class TellingDict(dict[str, Any]):
    """A sample that wants to hear of the device as well."""

    def to(self, device: Any) -> "TellingDict":
        return TellingDict({"x": self["x"].to(device), "told": device})


@dataclass
class TellingRecord:
    """Another one, whose batch is made in a slot."""

    x: Any
    told = None

    def to(self, device: Any) -> "TellingRecord":
        record = TellingRecord(self.x.to(device))
        record.told = device
        return record


@pytest.mark.parametrize("kind", [TellingDict, TellingRecord])
def test_a_batch_is_told_of_the_device_if_it_wants_to_be(rig: Any, kind: Any) -> None:
    with loader_on(rig, [kind(x=grid(i)) for i in range(4)], 2, num_workers=2) as loader:
        for number, batch in enumerate(loader):
            x, told = (batch["x"], batch["told"]) if kind is TellingDict else (batch.x, batch.told)
            assert told == rig.backend.device
            expected = torch.stack([torch.tensor(grid(2 * number)), torch.tensor(grid(2 * number + 1))])
            assert torch.equal(at_home(rig, x), expected)


def test_a_slot_goes_back_to_the_ring_when_its_copy_is_done(rig: Any) -> None:
    backend = rig.backend
    ring = Ring(new_memory=backend.host_memory, poison=POISON)
    copier = Copier(backend, ring)
    layout = Layout.of((grid(0), 1, "s"))
    assert layout is not None
    for number in range(4):
        slot = ring.acquire(layout.offsets(3)[1])
        columns = layout.columns(slot.arena, 3)
        assert all(layout.write(columns, row, [(grid(number), number, f"s{row}")]) for row in range(3))
        slot.seal()
        copied = copier.copy_slot(slot, layout, columns, 3)
        image, label, names = copier.receive(copied)
        rig.finish()
        assert slot.state is SlotState.COPYING  # until a slot is needed
        assert (image.cpu() == torch.tensor(grid(number))).all()
        assert (label.tolist(), names) == ([number] * 3, ("s0", "s1", "s2"))
    ring.release(ring.acquire(1))
    assert repr(ring) == "<Ring free=1 lent=0 copying=0>"


@pytest.mark.parametrize("call", ["new_stream", "copy", "copied", "record_event"])
def test_a_slot_whose_copy_fails_is_not_lost_and_not_reused_too_early(call: str) -> None:
    device, error = SimulatedDevice(), MemoryError()
    ring = Ring(new_memory=device.host_memory, poison=POISON)
    copier = Copier(device, ring)
    layout = Layout.of((grid(0), 1, "s"))
    assert layout is not None
    device.fail(call, error)
    slot = ring.acquire(layout.offsets(3)[1])
    columns = layout.columns(slot.arena, 3)
    slot.seal()
    with pytest.raises(MemoryError) as caught:
        copier.copy_slot(slot, layout, columns, 3)
    assert caught.value is error
    expected = {"new_stream": SlotState.FREE, "record_event": SlotState.DROPPED}
    assert slot.state is expected.get(call, SlotState.COPYING)
    if call in ("copy", "copied"):
        other = ring.acquire(1)
        assert other is not slot
        device.run()
        assert ring.acquire(1) is slot
        ring.release(other)
        ring.release(slot)
    del caught
    error.__traceback__ = None
    device.run()
    assert device.num_blocks_in_use == 0


def test_of_a_device_that_is_broken_nobody_can_say_that_a_slot_is_free() -> None:
    device = SimulatedDevice()
    ring = Ring(new_memory=device.host_memory)
    copier = Copier(device, ring)
    layout = Layout.of(grid(0))
    assert layout is not None
    slots = []
    for _ in range(2):
        slots.append(ring.acquire(layout.offsets(1)[1]))
        slots[-1].seal()
        copier.copy_slot(slots[-1], layout, layout.columns(slots[-1].arena, 1), 1)
    device.run()
    device.fail("query", RuntimeError("device-side assert"))
    assert ring.acquire(1) is slots[1]
    assert [slot.state for slot in slots] == [SlotState.DROPPED, SlotState.FILLING]
    ring.release(slots[1])


@cuda
def test_batches_that_are_held_never_change_and_no_stream_reads_too_early() -> None:
    rows = torch.arange(64 * 50_000, dtype=torch.float32).reshape(64, 50_000)
    samples = [(row, index) for index, row in enumerate(rows)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for dataset in (samples, TensorDataset(rows, torch.arange(64))):
        loader: DataLoader[Any] = DataLoader(dataset, 4, num_workers=3, device="cuda", persistent_workers=True)
        loader._runtime().ring.poison = POISON
        held, sums = [], []
        with loader, torch.cuda.stream(stream):
            for _ in range(3):
                for number, batch in enumerate(loader):
                    sums.append(batch[0].double().sum())  # issued at once, on this stream
                    if number % 4 == 1:
                        held.append((number, batch[0].clone() if number % 8 == 1 else batch[0]))
            stream.synchronize()
        expected = rows.double().reshape(16, -1).sum(1)
        assert torch.equal(torch.stack(sums).cpu(), expected.repeat(3))
        for number, tensor in held:
            assert torch.equal(tensor.cpu(), rows[number * 4 : number * 4 + 4])
        ring = loader._runtime().ring
        assert len(ring._free) <= ring.max_free


@cuda
def test_pinned_batches_on_the_cpu_are_pinned_and_stay_as_they_are() -> None:
    rows = torch.arange(4000.0).reshape(40, 100)
    for collate_fn in (None, torch.stack):
        loader: DataLoader[Any] = DataLoader(list(rows), 4, num_workers=2, pin_memory=True, collate_fn=collate_fn)
        loader._runtime().ring.poison = POISON
        with loader:
            held = [batch for _ in range(3) for batch in loader]
        assert all(batch.is_pinned() for batch in held)
        assert torch.equal(torch.cat(held), rows.repeat(3, 1))


@cuda
def test_the_device_asked_for_is_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    count = torch.cuda.device_count()
    assert resolve_device("cuda") == torch.device("cuda", torch.cuda.current_device())
    assert resolve_device(f"cuda:{count - 1}") == torch.device("cuda", count - 1)
    with pytest.raises(ArgumentError, match=f"sees {count} cuda device"):
        resolve_device(f"cuda:{count}")


def test_nested_tensors_are_left_for_the_consumers_stream() -> None:
    """They have no single piece of memory that could be marked as used there."""
    device = SimulatedDevice()
    for tensor in (nested(1, 2), torch.eye(2).to_sparse()):
        copied = Copier(device, Ring()).copy({"x": tensor})
        assert copied.value["x"] is tensor
        assert copied.is_partial
    assert device.num_copies == 0
    device.run()
