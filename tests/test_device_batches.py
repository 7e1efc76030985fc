"""Batches on a device: of random structures, compared there, byte by byte, while a stream is kept busy."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from oracle import assert_same
from rigs import RIGS, Simulated, bytes_of
from structures import Pair
from torch.utils.data import default_collate

from aioload import DataLoader
from aioload.structure import map_tensors
from aioload.testing import SimulatedDevice

POISON = 0xDB
NUM_TESTS = 10
NUM_SAMPLES = 16
NUMPY_DTYPES = ["u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
TORCH_DTYPES = [torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.complex64]
SIZES = [0, 1, 1, 2, 3, 3, 5, 8, 13, 40]

Make = Callable[[np.random.Generator], Any]


def a_structure(rng: random.Random, depth: int = 0) -> Make:
    """Return what makes samples of one structure, drawn at random, with other contents each."""
    if depth == 3 or rng.random() < 0.4 * depth:
        return rng.choice([an_array, a_tensor, a_scalar])(rng)
    parts = [a_structure(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    container = rng.choice([tuple, list, dict, Pair])
    if container is dict:
        return lambda draw: {f"key {number}": make(draw) for number, make in enumerate(parts)}
    if container is Pair:
        return lambda draw: Pair(parts[0](draw), parts[-1](draw))
    return lambda draw: container(make(draw) for make in parts)


def a_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3)))


def an_array(rng: random.Random) -> Make:
    shape, dtype = a_shape(rng), np.dtype(rng.choice(NUMPY_DTYPES))
    if rng.random() < 0.1:
        return lambda draw: draw.integers(0, 2, shape) > 0
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return lambda draw: np.frombuffer(bytearray(draw.bytes(num_bytes)), dtype).reshape(shape)


def a_tensor(rng: random.Random) -> Make:
    shape, dtype = a_shape(rng), rng.choice(TORCH_DTYPES)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if num_bytes == 0:
        return lambda draw: torch.empty(shape, dtype=dtype)
    return lambda draw: torch.frombuffer(bytearray(draw.bytes(num_bytes)), dtype=dtype).reshape(shape)


def a_scalar(rng: random.Random) -> Make:
    kinds: list[Make] = [
        lambda draw: int(draw.integers(-(2**40), 2**40)),
        lambda draw: float(draw.random()),
        lambda draw: bool(draw.integers(2)),
        lambda draw: np.float32(draw.random()),
        lambda draw: f"s{draw.integers(100)}",
    ]
    return rng.choice(kinds)


def with_their_number(samples: Any) -> Any:
    return {"samples": default_collate(samples), "number": torch.tensor(len(samples))}


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the lowest bit of each byte turned over."""
    return (bytes_of(tensor) ^ 1).view(tensor.dtype).reshape(tensor.shape)


class Way(NamedTuple):
    """How batches are made and get to the device."""

    collate_fn: Any = None
    is_turned: bool = False
    is_sent_by_user: bool = False


WAYS = [
    Way(),
    Way(collate_fn=with_their_number),
    Way(is_turned=True),
    Way(collate_fn=with_their_number, is_turned=True),
    Way(is_sent_by_user=True),
    Way(collate_fn=with_their_number, is_sent_by_user=True),
]


class Expected:
    """The batches of a loader as torch's makes them, and their bytes on the device."""

    def __init__(self, rig: Any, batches: list[Any]) -> None:
        self.structures = [map_tensors(batch, lambda tensor: tensor.to("meta")) for batch in batches]
        leaves = [[bytes_of(tensor) for tensor in tensors_of(batch)] for batch in batches]
        flat = rig.keep(torch.cat([leaf for batch in leaves for leaf in batch]))
        parts = iter(flat.split([len(leaf) for batch in leaves for leaf in batch]))
        self.leaves = [[next(parts) for _ in batch] for batch in leaves]


def tensors_of(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


@contextlib.contextmanager
def taking_from(loader: DataLoader[Any], *, awaits: bool) -> Iterator[Callable[[], Any]]:
    """Give what returns the next batch, or ``None``, by either face of the loader."""
    if not awaits:
        batches = iter(loader)
        yield lambda: next(batches, None)
        return
    with asyncio.Runner() as runner:
        later = aiter(loader)

        async def take() -> Any:
            return await anext(later, None)

        yield lambda: runner.run(take())


class Held(NamedTuple):
    """A view of a batch, until the batch of some number comes."""

    until: int
    stream: Any
    view: torch.Tensor
    expected: torch.Tensor

    def compare(self, rig: Any) -> None:
        with rig.backend.stream(self.stream):
            rig.compare(self.view, self.expected)


def a_view(rng: random.Random, number: int, stream: Any, tensor: torch.Tensor, expected: torch.Tensor) -> Held:
    until = number + rng.choice([1, 1, 2, 3, 8, 20, 1000])
    if tensor.dim() == 0 or rng.random() < 0.3:
        return Held(until, stream, tensor, expected)
    row, num_bytes = rng.randrange(len(tensor)), len(expected) // len(tensor)
    return Held(until, stream, tensor[row], expected[row * num_bytes : (row + 1) * num_bytes])


class Scene:
    """A loader of batches of a new structure, and a consumer that has the device compare them when it comes to that."""

    def __init__(self, rig: Any, rng: random.Random, num_batches: int) -> None:
        self.rig, self.rng, self.way = rig, rng, rng.choice(WAYS)
        draw, make = np.random.default_rng(rng.randrange(2**32)), a_structure(rng)
        self.samples = [(make(draw), np.arange(5) + number) for number in range(NUM_SAMPLES)]
        self.batches = [[rng.randrange(NUM_SAMPLES) for _ in range(rng.randint(1, 8))] for _ in range(num_batches)]
        plain: Any = torch.utils.data.DataLoader(
            self.samples,  # type: ignore[arg-type]
            batch_sampler=self.batches,
            collate_fn=self.way.collate_fn,
        )
        oracle = [map_tensors(batch, turned) if self.way.is_turned else batch for batch in plain]
        self.expected = Expected(rig, oracle)
        self.held: list[Held] = []

    def go(self, streams: list[Any]) -> None:
        """Load all there is, each batch for one of the streams."""
        with self._loader() as loader, taking_from(loader, awaits=self.rng.random() < 0.3) as take:
            for number in range(len(self.batches)):
                stream = self.rng.choice(streams)
                if self.rng.random() < 0.3:
                    self.rig.busy(stream, self.rng.choice([1e-5, 1e-4, 5e-4]))
                with self.rig.backend.stream(stream):
                    self._use(number, take(), stream)
                self._let_go(lambda each, number=number: each.until == number)  # type: ignore[misc]
            assert take() is None
        self._let_go(lambda each: True)

    def _loader(self) -> DataLoader[Any]:
        rig, rng, way = self.rig, self.rng, self.way
        more: dict[str, Any] = {}
        if way.is_sent_by_user:
            more["pin_memory"] = not isinstance(rig, Simulated)  # for it, there is nothing to pin for
        else:
            more["device"] = rig.backend if isinstance(rig.backend, SimulatedDevice) else rig.backend.device
            more["num_device_batches"] = rng.randint(1, 3)
        if way.is_turned:
            more["device_transform"] = lambda batch: map_tensors(batch, lambda tensor: rig.launch(turned, tensor))
        loader: DataLoader[Any] = DataLoader(
            self.samples,
            batch_sampler=self.batches,
            collate_fn=way.collate_fn,
            num_workers=rng.randint(0, 4),
            **more,
        )
        loader._runtime().ring.poison = POISON
        return loader

    def _use(self, number: int, batch: Any, stream: Any) -> None:
        if self.way.is_sent_by_user:
            batch = map_tensors(batch, self.rig.send)  # and what it was made from is gone
        assert_same(map_tensors(batch, lambda tensor: tensor.to("meta")), self.expected.structures[number])
        for tensor, expected in zip(tensors_of(batch), self.expected.leaves[number], strict=True):
            assert tensor.device == self.rig.backend.device
            self.rig.compare(tensor, expected)
            if self.rng.random() < 0.2:
                self.held.append(a_view(self.rng, number, stream, tensor, expected))

    def _let_go(self, is_due: Callable[[Held], bool]) -> None:
        due = [each for each in self.held if is_due(each)]
        self.held = [each for each in self.held if not is_due(each)]
        for each in due:
            each.compare(self.rig)


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("seed", range(NUM_TESTS))
def test_every_batch_is_that_of_torch_when_a_busy_stream_comes_to_it(rig: Any, seed: int) -> None:
    rng = random.Random(seed)
    rig = rig(rng)
    streams = [rig.backend.current_stream(), rig.backend.new_stream(), rig.backend.new_stream()]
    num_scenes, num_batches = (4, 8) if isinstance(rig, Simulated) else (20, 50)  # the latter makes 10,000 of them
    for _ in range(num_scenes):
        scene = Scene(rig, rng, num_batches)
        scene.go(streams)
        assert rig.num_different() == 0, scene.way
