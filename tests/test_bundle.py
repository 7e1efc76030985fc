"""A batch that a ``collate_fn`` made in memory of its own goes to a device in one copy, like one with a layout."""

import random
from typing import Any

import pytest
import torch
from oracle import assert_same
from structures import MyTensor
from torch.utils.data import default_collate

from aioload import DataLoader
from aioload.bundle import bundle
from aioload.ring import Ring
from aioload.slot import SlotState
from aioload.structure import map_tensors
from aioload.testing import SimulatedDevice

POISON = 0xDB

TENSORS: dict[str, Any] = {
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.empty(0, 3),
    "contiguous": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
    "channels last": lambda: torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "every other": lambda: torch.arange(24)[::2],
    "expanded": lambda: torch.arange(4.0).expand(3, 4),
    "a part of a larger one": lambda: torch.arange(100.0)[30:40],
    "bool": lambda: torch.arange(5) % 2 == 0,
    "bfloat16": lambda: torch.arange(5, dtype=torch.bfloat16),
    "complex": lambda: torch.arange(3) * 1j,
    "float8": lambda: torch.arange(3.0).to(torch.float8_e4m3fn),
    "conjugated": lambda: (torch.arange(3) * 1j).conj(),
    "negated": lambda: (torch.arange(3) * 1j).conj().imag,
    "subclass": lambda: torch.arange(3.0).as_subclass(MyTensor),
    "of a graph": lambda: torch.arange(3.0, requires_grad=True),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_it_is_on_the_device_what_it_was(make: Any, num_workers: int) -> None:
    def collate(samples: list[int]) -> Any:
        return {"x": make(), "others": (torch.tensor(samples), [make(), "s", None, 1.5])}

    with SimulatedDevice(pace=random.Random(1)) as device:
        loader: DataLoader[Any] = DataLoader(range(12), 3, collate_fn=collate, num_workers=num_workers, device=device)
        loader._runtime().ring.poison = POISON
        batches = list(loader)
        device.run()
        for number, batch in enumerate(batches):
            expected = collate(list(range(3 * number, 3 * number + 3)))
            assert_same(batch, expected)
            for ours, plain in zip(tensors_in(batch), tensors_in(expected), strict=True):
                assert ours.stride() == torch.empty_like(plain).stride()  # as .to() has it


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_takes_one_copy_and_one_piece_of_device_memory(num_workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        return default_collate(samples)

    samples = [{f"leaf {number}": torch.full((number,), index) for number in range(1, 21)} for index in range(12)]
    with SimulatedDevice() as device:
        loader: DataLoader[Any] = DataLoader(samples, 3, collate_fn=collate, num_workers=num_workers, device=device)
        for number, batch in enumerate(loader, 1):
            device.run()
            assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1
            assert all(tensor.data_ptr() % 64 == 0 for tensor in batch.values())
            assert device.num_copies >= number
        assert device.num_copies == 4


def test_a_slot_may_begin_anywhere_in_its_memory() -> None:
    def at_64(num_bytes: int) -> torch.Tensor:
        whole = torch.empty(num_bytes + 128, dtype=torch.uint8)
        start = -whole.data_ptr() % 64 or 64
        return whole[start : start + num_bytes]

    value = [torch.arange(8), {"x": torch.ones(3, 3)}]
    found = bundle(value, Ring(new_memory=at_64))
    assert found is not None
    bundled, slot = found
    moved = bundled.moved(slot.tensor(bundled.num_bytes).clone(), lambda tensor: pytest.fail(str(tensor)))
    assert_same(moved, value)


def test_what_is_twice_in_a_batch_is_copied_once() -> None:
    x = torch.arange(8)
    found = bundle([x, {"again": x, "part": x[2:4]}], Ring())
    assert found is not None
    bundled, slot = found
    assert bundled.num_bytes == 128  # the part on its own, as a device could not tell that it is one
    assert slot.state is SlotState.READY
    moved = bundled.moved(slot.tensor(bundled.num_bytes).clone(), lambda tensor: pytest.fail(str(tensor)))
    assert moved[0].data_ptr() == moved[1]["again"].data_ptr()
    assert_same(moved, [x, {"again": x, "part": x[2:4]}])


class Fresh(list[Any]):
    """A sequence whose parts are made whenever they are asked for."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([len(self), index])

    def __iter__(self) -> Any:
        return iter([self[index] for index in range(len(self))])


def test_parts_that_are_new_at_each_look_are_moved_too() -> None:
    with SimulatedDevice(pace=random.Random(2)) as device:
        loader: DataLoader[Any] = DataLoader(range(2), 2, collate_fn=Fresh, num_workers=1, device=device)
        (batch,) = loader
        device.run()
        assert [each.tolist() for each in list(batch)] == [[2, 0], [2, 1]]


def test_of_a_batch_without_plain_tensors_there_is_no_bundle() -> None:
    ring = Ring()
    for value in ["s", [], {"x": torch.eye(2).to_sparse()}, torch.ones(2, requires_grad=True), torch.empty(0)]:
        assert bundle(value, ring) is None
    assert repr(ring) == "<Ring free=0 lent=0 copying=0>"


def test_a_batch_that_cannot_be_bundled_gives_its_slot_back() -> None:
    class Once(list[Any]):
        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            if self.looks == 3:  # the first two are to see what there is
                message = "only once"
                raise OSError(message)
            return super().__iter__()

    ring = Ring()
    with pytest.raises(OSError, match="only once"):
        bundle(Once([torch.ones(2)]), ring)
    assert repr(ring) == "<Ring free=1 lent=0 copying=0>"


def test_batches_that_nobody_takes_give_their_slots_back() -> None:
    with SimulatedDevice() as device:
        loader: DataLoader[Any] = DataLoader(
            range(40), 4, collate_fn=torch.tensor, num_workers=2, prefetch_factor=2, device=device
        )
        ring = loader._runtime().ring
        batches = iter(loader)
        next(batches)
        batches.close()
        loader.close()
        del batches
        device.run()
        ring.release(ring.acquire(1))
        assert ring.num_copying == 0
        assert device.num_blocks_in_use == 0
