"""Memory of engine processes that the consumer's page-locks: once, undone before it is unmapped, read until then."""

import functools
import gc
import os
import random
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from abroad import Growing, Mixed, Points, ragged
from conftest import join_all, loader_threads
from oracle import assert_same, torch_outcomes
from rigs import ON_CUDA, RIGS
from scripts import Nursery

from aioload import DataLoader
from aioload.device import CudaBackend
from aioload.engine import runtime
from aioload.engine.segments import Mapping, new_file
from aioload.ring import Ring
from aioload.slot import Slot, SlotState
from aioload.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("forks_are_served", "no_process_is_left")

SIZE = 3 * 4096 + 100


def loader_of(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, **{"processes": 2, "num_workers": 2, **arguments})


def is_mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


class Noting(SimulatedDevice):
    """A device that knows what it locked, and whether that was there when it was unlocked."""

    def __init__(self, pace: random.Random | None = None) -> None:
        super().__init__(pace=pace)
        self.locked: list[tuple[int, int]] = []
        self.was_mapped: list[bool] = []

    def page_lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        unlock, address = super().page_lock(memory), memory.data_ptr()
        self.locked.append((address, memory.nbytes))

        def undo() -> bool:
            self.was_mapped.append(is_mapped(address))
            return unlock()

        return undo


def read_all(loader: DataLoader[Any], device: SimulatedDevice) -> list[torch.Tensor]:
    """Return what the device reads of the batches, each let go at once."""
    readings = []
    for batch in loader:
        readings.append(device.read(batch.image))
        del batch
    device.run()
    return [reading.value for reading in readings]


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_copied_from_where_the_processes_wrote_them_which_is_locked_once(seed: int) -> None:
    expected = [batch.image for batch in torch_outcomes(Points(160), batch_size=4)]
    with Noting(random.Random(seed)) as device:
        loader = loader_of(Points(160), device=device, persistent_workers=True)
        for _ in range(2):
            assert_same(read_all(loader, device), expected)
        locked = len(device.locked)
        assert 0 < locked < 40 / 2
        assert {size for _, size in device.locked} == {4096}
        assert loader.stats().pinned_bytes == device.host_bytes == 4096 * (locked - len(device.was_mapped)) > 0
        loader.close()
        join_all(loader_threads())
        gc.collect()  # of what has been handed over and not taken
        loader._runtime().ring.take_in()
        assert device.was_mapped == [True] * locked
        assert device.host_bytes == 0


def test_batches_that_grow_are_locked_anew_few_times() -> None:
    with Noting(random.Random(0)) as device:
        loader: DataLoader[Any] = DataLoader(Growing(200), 1, processes=1, num_workers=1, device=device)
        with loader:
            for number, batch in enumerate(loader):
                assert batch.shape == (1, 100 * (number + 1))
    assert {size for _, size in device.locked} == {4096, 8192, 16384, 32768}
    assert len(device.locked) <= 4 * 8  # sizes; slots


@pytest.mark.parametrize("collate_fn", [None, ragged])
def test_what_has_no_layout_is_not_copied_from_memory_that_torch_does_not_know(collate_fn: Any) -> None:
    dataset: Any = Mixed(80) if collate_fn is None else Points(80)
    with Noting(random.Random(0)) as device, loader_of(dataset, device=device, collate_fn=collate_fn) as loader:
        readings = []
        for batch in loader:
            name = "x" if collate_fn is None else "turned"
            readings.append(device.read(batch[name]))
            del batch
        device.run()
        assert (len(device.locked) > 0) == (collate_fn is None)
    expected = torch_outcomes(dataset, batch_size=4, collate_fn=collate_fn)
    assert_same([reading.value for reading in readings], [batch[name] for batch in expected])


def a_slot(ring: Ring, home: Callable[[], object] = int) -> Slot:
    """Return a slot over memory of another process's, which has filled it with sevens, locked."""
    slot = ring.adopt(Mapping(new_file(SIZE)))
    slot.arena[:] = 7
    slot.arrive(home)
    ring.page_lock(slot)
    return slot


def test_a_copy_is_lent_of_memory_that_is_locked_where_it_is() -> None:
    device, freed = Noting(), list[str]()
    ring = Ring(page_lock=device.page_lock)
    slot = a_slot(ring, functools.partial(freed.append, "it"))
    lent = ring.lend(slot)(torch.int32, 5, 64)
    assert (slot.state, freed) == (SlotState.FREE, ["it"])
    slot.arena[:] = 8
    assert lent.tolist() == [0x07070707] * 5
    assert ring.num_lent == 0


@pytest.mark.parametrize("is_run_before", [False, True])
def test_memory_is_kept_until_it_has_been_copied_also_if_its_ring_is_gone(is_run_before: bool) -> None:
    device = Noting()
    ring = Ring(page_lock=device.page_lock)
    slot = a_slot(ring)
    stream = device.new_stream()
    copied = device.copy(slot.tensor(SIZE), stream)
    ring.release_behind(slot, device.record_event(stream))
    if is_run_before:
        device.run()
    del ring, slot
    gc.collect()
    assert device.was_mapped == ([True] if is_run_before else [])
    device.run()
    assert (copied == 7).all()
    Ring(page_lock=device.page_lock)
    gc.collect()
    assert device.was_mapped == [True]
    assert device.host_bytes == 0


@pytest.mark.parametrize("how", ["dropped", "query", "query, ring gone"])
def test_memory_of_which_nobody_can_tell_when_it_has_been_copied_stays(how: str) -> None:
    device = Noting()
    ring = Ring(page_lock=device.page_lock)
    slot = a_slot(ring)
    (address, _), gone = device.locked[0], weakref.ref(slot.foreign)
    if how == "dropped":
        ring.drop(slot)
    else:
        ring.release_behind(slot, device.record_event(device.new_stream()))
        device.fail("query", RuntimeError("CUDA error: an illegal memory access was encountered"))
        if how == "query":
            ring.take_in()
    del ring, slot
    gc.collect()
    Ring(page_lock=device.page_lock)
    assert gone() is None
    assert is_mapped(address)
    assert device.was_mapped == []


def test_beyond_what_a_loader_may_have_it_stays_as_it_is_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "available_bytes", lambda: 4 * 4096)
    with Noting(random.Random(0)) as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loader_of(Points(160), device=device, prefetch_bytes=8192, persistent_workers=True) as loader:
            expected = [batch.image for batch in torch_outcomes(Points(160), batch_size=4)]
            while not caught:  # that is, until three slots have been in use at a time
                assert_same(read_all(loader, device), expected)
            assert_same(read_all(loader, device), expected)
            assert device.max_host_bytes == 2 * 4096
            assert 0 < loader.stats().pinned_bytes <= 2 * 4096  # one may have made room since
    assert [each.category for each in caught] == [RuntimeWarning]
    assert "more than the 8192 that this loader may have" in str(caught[0].message)


class Cudart:
    """In place of CUDA's calls, which it notes; each may fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.sizes: dict[int, int] = {}
        self.codes = {"register": 0, "unregister": 0}
        self.is_capturing = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        assert is_mapped(address)
        assert is_mapped(address + num_bytes - 1)
        self.calls.append(("register", address))
        if self.codes["register"] == 0:
            self.sizes[address] = num_bytes
        return self.codes["register"]

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)
        self.calls.append(("unregister", address))
        if self.codes["unregister"] == 0:
            del self.sizes[address]
        return self.codes["unregister"]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """Have torch.cuda make the calls of a fake."""
    fake = Cudart()

    def check_error(code: int) -> None:
        if code != 0:
            message = f"CUDA error {code}"
            raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    return fake


class Registering(SimulatedDevice):
    """A device that is simulated but for its page-locking, which is CUDA's."""

    def __init__(self) -> None:
        super().__init__(pace=random.Random(0))

    def page_lock(self, memory: torch.Tensor) -> Callable[[], bool]:
        return CudaBackend(torch.device("cuda", 0)).page_lock(memory)


def test_cuda_registers_each_mapping_once_and_before_it_is_unmapped_no_longer(cudart: Cudart) -> None:
    with Registering() as device:
        loader = loader_of(Points(160), device=device, persistent_workers=True)
        for _ in range(2):
            assert len(read_all(loader, device)) == 40
        registered = [address for call, address in cudart.calls if call == "register"]
        assert 0 < len(registered) < 40 / 2
        assert set(cudart.sizes.values()) == {4096}
        loader.close()
        del loader
        join_all(loader_threads())
        gc.collect()
    assert sorted(address for call, address in cudart.calls if call == "unregister") == sorted(registered)
    assert cudart.sizes == {}


def test_where_cuda_does_not_register_memory_it_stays_as_it_is_with_one_warning(cudart: Cudart) -> None:
    cudart.codes["register"] = 2
    with Registering() as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loader_of(Points(160), device=device) as loader:
            assert_same(read_all(loader, device), [b.image for b in torch_outcomes(Points(160), batch_size=4)])
            assert loader.stats().pinned_bytes == 0
    assert len(cudart.calls) == 1  # not again while there is no less of it
    assert [each.category for each in caught] == [RuntimeWarning]
    assert "RuntimeError('CUDA error 2')" in str(caught[0].message)


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but")
def test_without_a_device_nothing_is_registered(cudart: Cudart, pin_memory: bool) -> None:
    with loader_of(Points(16), pin_memory=pin_memory) as loader:
        assert len(list(loader)) == 4
    assert cudart.calls == []


def locked_mapping() -> tuple[Mapping, int]:
    mapping = Mapping(new_file(SIZE))
    mapping.before_unmapping(CudaBackend(torch.device("cuda", 0)).page_lock(mapping.memory))
    return mapping, mapping.memory.data_ptr()


def test_what_cannot_be_unregistered_stays_mapped(cudart: Cudart) -> None:
    mapping, address = locked_mapping()
    cudart.codes["unregister"] = 700
    del mapping
    assert is_mapped(address)
    assert cudart.calls[-1] == ("unregister", address)


def test_nothing_is_unregistered_in_the_middle_of_a_graph(cudart: Cudart) -> None:
    mapping, address = locked_mapping()
    cudart.is_capturing = True
    del mapping
    assert is_mapped(address)
    assert cudart.calls == [("register", address)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_unmaps_its_own_and_leaves_cuda_alone(cudart: Cudart) -> None:
    mapping, address = locked_mapping()
    pid = os.fork()
    if pid == 0:
        try:
            del mapping
            os._exit(2 * is_mapped(address) + len(cudart.calls) - 1)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mapping.memory.sum() == 0
    assert cudart.calls == [("register", address)]


def test_when_the_interpreter_ends_nothing_is_undone(nursery: Nursery) -> None:
    out = nursery.run_quietly("""
    from aioload.engine.segments import Mapping, new_file
    mapping = Mapping(new_file(5000))
    mapping.before_unmapping(lambda: print("undone", flush=True))
    other = Mapping(new_file(5000))
    other.before_unmapping(lambda: print("let go", flush=True) is None)
    del other
    """)
    assert out == "let go\n"


# A real device and the simulated one.


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_copies_from_memory_that_is_locked_run_beside_the_host(rig: Any) -> None:
    backend, mapping = rig.backend, Mapping(new_file(SIZE))
    mapping.memory.copy_((torch.arange(SIZE) % 251).to(torch.uint8))
    mapping.before_unmapping(backend.page_lock(mapping.memory))
    side = backend.new_stream()
    backend.copy(mapping.memory, side)  # the allocator keeps memory for the next
    rig.finish()
    rig.busy(side)
    copied = backend.copy(mapping.memory[64:], side)
    event = backend.record_event(side)
    assert not event.query()
    rig.finish()
    assert event.query()
    assert torch.equal(copied.cpu(), mapping.memory[64:])


def test_memory_may_be_locked_again_where_some_was_that_is_gone(rig: Any) -> None:
    for number in range(20):
        mapping = Mapping(new_file(SIZE))
        mapping.before_unmapping(rig.backend.page_lock(mapping.memory))
        mapping.memory.fill_(number)
        copied = rig.backend.copy(mapping.memory, rig.backend.new_stream())
        rig.finish()
        assert (copied.cpu() == number).all()
        del mapping


def cuda(function: Any) -> Any:
    for mark in ON_CUDA:
        function = mark(function)
    return function


@cuda
def test_cuda_knows_memory_that_is_locked() -> None:
    backend, mapping = CudaBackend(torch.device("cuda", 0)), Mapping(new_file(SIZE))
    memory = mapping.memory
    assert not memory.is_pinned()
    undo = backend.page_lock(memory)
    assert memory.is_pinned()
    assert memory[SIZE - 4 :].view(torch.int32).is_pinned()
    with pytest.raises(RuntimeError):
        backend.page_lock(memory)
    assert undo()
    assert not memory.is_pinned()
    assert not undo()  # and torch does not meet that error later
    torch.ones(3, device="cuda").add_(1)


@cuda
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_of_processes_come_to_cuda_from_memory_that_is_locked(persistent: bool) -> None:
    expected = [batch.image for batch in torch_outcomes(Points(400), batch_size=4)]
    with loader_of(Points(400), device="cuda", persistent_workers=persistent) as loader:
        for _ in range(3):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            got = []
            with torch.cuda.stream(side):
                for batch in loader:
                    torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
                    got.append(batch.image.clone())
                    del batch
            torch.cuda.synchronize()
            assert_same([image.cpu() for image in got], expected)
            assert loader.stats().pinned_bytes > 0
