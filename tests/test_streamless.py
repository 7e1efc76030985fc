"""Devices without streams: batches get there in the consumer's thread, as they would have been on the CPU."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerators import lazy_device
from oracle import assert_same

from aioload import DataLoader
from aioload.device import StreamlessBackend
from aioload.errors import error_context
from aioload.structure import map_tensors

POISON = 0xDB


class Watched:
    """A device without streams that notes in which threads it is asked for copies, and refuses some."""

    def __init__(self, refuse: Callable[[int], bool] = lambda number: False) -> None:
        self._backend, self._refuse = StreamlessBackend(lazy_device()), refuse
        self.threads: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def copy(self, tensor: torch.Tensor, stream: Any = None) -> torch.Tensor:
        self.threads.append(threading.get_ident())
        if self._refuse(len(self.threads)):
            message = "out of memory"
            raise MemoryError(message)
        return self._backend.copy(tensor, stream)


class Own:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> "Own":
        return Own(self.x.to(device))


def sample(index: int) -> Any:
    return {"x": torch.full((3, 4), index + 0.5), "deep": [(index, index > 2), f"s{index}"], "d": index / 7}


def collate_own(samples: list[Any]) -> Own:
    return Own(torch.stack([each["x"] for each in samples]))


def at_home(batch: Any) -> Any:
    """Return a batch that must be on the device, on the CPU."""

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == lazy_device()
        return tensor.cpu()

    return map_tensors(batch, fetch)


async def all_of(loader: DataLoader[Any]) -> list[Any]:
    return [batch async for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, list])
def test_batches_are_those_of_the_cpu(num_workers: int, collate_fn: Any) -> None:
    samples = [sample(index) for index in range(7)]
    device = Watched()
    expected = list(DataLoader(samples, 2, num_workers=0, collate_fn=collate_fn))
    with DataLoader(samples, 2, num_workers=num_workers, collate_fn=collate_fn, device=device) as ours:
        ours._runtime().ring.poison = POISON
        for batches in (list(ours), list(ours), asyncio.run(all_of(ours))):
            assert_same([at_home(batch) for batch in batches], expected)
        assert ours._runtime().ring.num_lent == 0
    assert set(device.threads) == {threading.get_ident()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_objects_of_the_users_move_themselves(num_workers: int) -> None:
    samples = [sample(index) for index in range(4)]
    with DataLoader(samples, 2, num_workers=num_workers, collate_fn=collate_own, device=Watched()) as loader:
        xs = [at_home(batch.x) for batch in loader]
    assert torch.equal(torch.cat(xs), torch.stack([each["x"] for each in samples]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_device_transform_has_the_batch_on_the_device_in_the_consumers_thread(num_workers: int) -> None:
    threads = set()

    def double(batch: Any) -> Any:
        threads.add(threading.get_ident())
        assert batch.device == lazy_device()
        return batch * 2

    device = Watched()
    with DataLoader(torch.arange(6.0), 2, num_workers=num_workers, device=device, device_transform=double) as loader:
        assert torch.equal(torch.cat([at_home(batch) for batch in loader]), torch.arange(6.0) * 2)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stage", ["copy", "device_transform"])
def test_an_error_is_that_of_its_batch(num_workers: int, stage: str) -> None:
    def transform(batch: Any) -> Any:
        if stage == "device_transform" and batch.cpu()[0] == 2:
            message = "no"
            raise MemoryError(message)
        return batch

    device = Watched(lambda number: stage == "copy" and number == 2)
    with DataLoader(torch.arange(6), 2, num_workers=num_workers, device=device, device_transform=transform) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(MemoryError) as caught:
            next(batches)
        context = error_context(caught.value)
        assert context is not None
        assert (context.index, context.stage) == ([2, 3], stage)
        assert next(batches).tolist() == [4, 5]
        assert next(batches, None) is None
        del caught, context


TENSORS = {
    "bytes": torch.arange(200, dtype=torch.uint8),
    "one number": torch.tensor(3, dtype=torch.int16),
    "none": torch.empty(0, 3),
    "every other": torch.arange(40).reshape(4, 10)[:, ::2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "bfloat16": torch.randn(3).bfloat16(),
    "complex": torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_copy_is_done_when_it_returns(tensor: torch.Tensor) -> None:
    backend = StreamlessBackend(lazy_device())
    stream = backend.new_stream()
    source = tensor.clone()
    with backend.stream(stream):
        copied = backend.copy(source, stream)
    event = backend.record_event(stream)
    source.zero_()
    assert event.query()
    event.synchronize()
    backend.wait_event(backend.current_stream(), event)
    backend.record_stream(copied, backend.current_stream())
    assert copied.device == backend.device
    assert torch.equal(copied.cpu(), tensor)
    assert backend.copy(copied) is copied


def test_its_host_memory_is_aligned() -> None:
    memory = StreamlessBackend(lazy_device()).host_memory(1000)
    assert (memory.dtype, memory.shape, memory.data_ptr() % 64) == (torch.uint8, (1000,), 0)
