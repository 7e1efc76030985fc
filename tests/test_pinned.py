"""Page-locked memory: bounded, reported, in few sizes; where there is no more of it, other memory does."""

import gc
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rigs import ON_CUDA

from aioload import DataLoader
from aioload.engine import runtime
from aioload.pinned import Living, PinnedMemory, piece_bytes
from aioload.ring import Ring
from aioload.testing import SimulatedDevice


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), (3 << 30, 4 << 30)]
)
def test_pieces_are_powers_of_two(num_bytes: int, expected: int) -> None:
    assert piece_bytes(num_bytes) == expected


def plain(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def cycle_of(memory: torch.Tensor) -> Any:
    cycle: list[Any] = [memory]
    cycle.append(cycle)
    return cycle


HELD_AS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda memory: memory,
    "part": lambda memory: memory[3:4],
    "other dtype": lambda memory: memory.view(torch.int32),
    "array": lambda memory: memory.numpy(),
    "storage": lambda memory: memory.untyped_storage(),
    "part of an array's exporter": lambda memory: torch.from_numpy(memory.numpy()[8:]),
    "capsule": lambda memory: memory.__dlpack__(),
    "cycle": cycle_of,
}


@pytest.mark.parametrize("hold", HELD_AS.values(), ids=HELD_AS.keys())
def test_memory_counts_as_long_as_anything_refers_to_it(hold: Any) -> None:
    living = Living()
    memory = plain(64)
    living.add(memory)
    held = hold(memory)
    del memory
    gc.collect()
    assert living.count() == (1, 64)
    del held
    gc.collect()
    assert living.count() == (0, 0)


def test_what_is_gone_is_forgotten_however_seldom_it_is_asked_for() -> None:
    living = Living()
    kept = [plain(8) for _ in range(40)]
    for memory in kept:
        living.add(memory)
    for _ in range(10_000):
        living.add(plain(8))
    assert living.num_at_most <= 2 * 40 + 2 * 16
    assert living.count() == (40, 320)


def test_there_is_never_more_of_it_than_allowed() -> None:
    pinned = PinnedMemory(plain, 3 * 4096)
    held = [pinned.allocate(4096) for _ in range(2)]
    with pytest.raises(MemoryError, match="16384 bytes of it would be more than the 12288 that this loader may have"):
        pinned.allocate(4097)
    held.append(pinned.allocate(4000))
    with pytest.raises(MemoryError):
        pinned.allocate(1)
    assert pinned.num_bytes == 3 * 4096
    del held[0]
    assert pinned.num_bytes == 2 * 4096
    held.append(pinned.allocate(4096))


def test_when_there_is_none_to_be_had_it_is_asked_for_again_only_when_some_has_been_let_go() -> None:
    asked = []

    def give(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        if len(asked) == 3:
            message = "CUDA error: out of memory"
            raise RuntimeError(message)
        return plain(num_bytes)

    pinned = PinnedMemory(give, 1 << 20)
    held = [pinned.allocate(64) for _ in range(2)]
    with pytest.raises(RuntimeError, match="out of memory"):
        pinned.allocate(64)
    for _ in range(3):
        with pytest.raises(MemoryError, match=r"none to be had beyond 128 bytes: RuntimeError\('CUDA error: out of"):
            pinned.allocate(64)
    assert len(asked) == 3
    held.pop()
    held.append(pinned.allocate(64))
    held.append(pinned.allocate(64))
    assert len(asked) == 5


class Growing:
    """Batches of one sample each, of one byte more than the one before."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return np.full(100 * (index + 1), index, np.uint8)


def test_batches_that_grow_take_new_memory_few_times() -> None:
    sizes = []

    class Device(SimulatedDevice):
        def host_memory(self, num_bytes: int) -> torch.Tensor:
            sizes.append(num_bytes)
            return super().host_memory(num_bytes)

    with Device() as device:
        loader: DataLoader[Any] = DataLoader(Growing(), 1, num_workers=1, prefetch_factor=2, device=device)
        loader._runtime().ring.poison = 0xDB
        for index, batch in enumerate(loader):
            device.run()
            assert batch.shape == (1, 100 * (index + 1))
            assert (batch == index).all()
    assert set(sizes) <= {4096, 8192, 16384, 32768}
    assert len(sizes) <= 4 * 6  # sizes; two ahead, two on the device, one being taken, one being made


def test_a_loader_says_how_much_of_it_it_has() -> None:
    with SimulatedDevice(pace=random.Random(0)) as device:
        loader: DataLoader[Any] = DataLoader([np.zeros(1000)] * 40, 4, num_workers=2, device=device)
        assert loader.stats().pinned_bytes == 0
        seen = set()
        for _ in loader:
            stats = loader.stats()
            seen.add(stats.pinned_bytes)
            assert stats.pinned_bytes % (1 << 15) == 0
        assert max(seen) <= device.max_host_bytes <= 9 << 15
        assert min(seen) >= 1 << 15
        loader.close()
        assert loader.stats().pinned_bytes == device.host_bytes
    with DataLoader([np.zeros(1000)] * 40, 4, num_workers=2) as loader:
        assert len(list(loader)) == 10
        assert loader.stats().pinned_bytes == 0


def test_beyond_what_a_loader_may_have_other_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "available_bytes", lambda: 4 << 16)
    device = SimulatedDevice()
    rows = [np.full(1 << 11, index) for index in range(40)]
    loader: DataLoader[Any] = DataLoader(
        rows, 4, num_workers=2, num_device_batches=10, prefetch_bytes=1 << 16, device=device
    )
    loader._runtime().ring.poison = 0xDB
    with loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(loader)  # nothing is done on the device meanwhile, so a slot is needed for each
    assert device.max_host_bytes <= 2 << 16
    device.run()
    for number, batch in enumerate(batches):
        assert batch.tolist() == [[index] * (1 << 11) for index in range(4 * number, 4 * number + 4)]
    assert [each.category for each in caught] == [RuntimeWarning]
    assert "no page-locked memory for a batch" in str(caught[0].message)
    assert "more than the 131072 that this loader may have" in str(caught[0].message)


def test_memory_that_is_page_locked_is_taken_first_and_let_go_last() -> None:
    pinned = PinnedMemory(plain, 2 * 4096)
    ring = Ring(new_memory=pinned.allocate, max_free=2)
    slots = [ring.acquire(4096) for _ in range(3)]
    assert [slot.is_pinned for slot in slots] == [True, True, False]
    for slot in [slots[0], slots[2], slots[1]]:
        ring.release(slot)
    assert pinned.num_bytes == 2 * 4096
    assert [ring.acquire(4096).is_pinned for _ in range(3)] == [True, True, False]


def test_batches_that_are_held_are_told_of_where_slots_do_not_come_back() -> None:
    ring = Ring(new_memory=PinnedMemory(plain, 1 << 30).allocate, reuse=False, warn_held=5, warn_held_bytes=5 * 4096)
    held = list[torch.Tensor]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(20):
            slot = ring.acquire(4096)
            slot.seal()
            held.append(ring.lend(slot)(torch.uint8, 4096, 0))
            if number < 10:
                del held[:-4]
            del slot
            ring.warn_if_held()
            assert (len(caught) > 0) == (len(held) >= 5)
    assert ring.num_lent == len(held)


def test_threads_together_do_not_take_more_than_allowed() -> None:
    pinned, start, held = PinnedMemory(plain, 20 * 64), threading.Barrier(4), list[torch.Tensor]()

    def take() -> None:
        start.wait()
        for _ in range(10):
            try:
                held.append(pinned.allocate(64))
            except MemoryError:
                return

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 20


def cuda(function: Any) -> Any:
    for mark in ON_CUDA:
        function = mark(function)
    return function


@cuda
@pytest.mark.parametrize("collate_fn", [None, torch.stack])
def test_a_batch_may_be_let_go_while_the_consumers_own_copy_of_it_is_under_way(collate_fn: Any) -> None:
    rows = torch.arange(64.0).repeat(100_000, 1).T.contiguous()
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    loader: DataLoader[Any] = DataLoader(list(rows), 2, num_workers=2, pin_memory=True, collate_fn=collate_fn)
    copies = []
    with loader:
        for number, batch in enumerate(loader):
            assert batch.is_pinned()
            with torch.cuda.stream(streams[number % 3]):
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
                copies.append(batch.to("cuda", non_blocking=True))
        assert loader.stats().pinned_bytes > 0 or collate_fn is not None
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(copies).cpu(), rows)
