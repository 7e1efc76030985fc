"""A batch of dataclass instances is an instance of the same dataclass, whose fields are batches."""

import collections
import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pytest
import torch
from oracle import WAYS, assert_parity, assert_same
from structures import MakeSample, grid
from torch.utils.data import default_collate

from aioload import DataLoader, error_context
from aioload.errors import SampleTypeError

T = TypeVar("T")


@dataclass
class Plain:
    image: Any
    label: int
    name: str = "s"


@dataclass(frozen=True)
class Frozen:
    image: Any
    label: int


@dataclass(slots=True)
class WithSlots:
    image: Any
    label: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FrozenWithSlots:
    image: Any
    label: int


@dataclass
class Checked:
    image: Any
    label: int
    area: int = field(init=False)
    unit: dataclasses.InitVar[int] = 1
    num_made: ClassVar[int] = 0

    def __post_init__(self, unit: int) -> None:
        if self.image.ndim != 2:
            raise ValueError
        self.area = self.image.size * unit


class Base:
    def __init__(self) -> None:
        raise AssertionError

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError


@dataclass(init=False)
class Odd(Base):
    label: int

    def __getattribute__(self, name: str) -> Any:
        return 7 if name == "label" else super().__getattribute__(name)


@dataclass
class Child(Plain, Generic[T]):
    extra: T | None = None


@dataclass
class Empty:
    pass


@dataclass
class Parent:
    child: Frozen
    children: tuple[Plain, dict[str, WithSlots]]
    empty: Empty
    records: list[Frozen]


def odd(i: int) -> Odd:
    return Odd.__new__(Odd)


def parent(i: int) -> Parent:
    children = (Plain(grid(i), i), {"a": WithSlots(torch.tensor(i), i)})
    return Parent(Frozen(i / 2, i), children, Empty(), [Frozen(f"s{i}", i)] * 2)


DATACLASSES: dict[str, MakeSample] = {
    "plain": lambda i: Plain(grid(i), i, f"s{i}"),
    "frozen": lambda i: Frozen(torch.tensor(grid(i)), i),
    "slots": lambda i: WithSlots(np.float32(i), i),
    "frozen with slots": lambda i: FrozenWithSlots(image=b"s", label=i),
    "checked": lambda i: Checked(grid(i), i),
    "generic child": lambda i: Child(grid(i), i, extra=grid(i)),
    "odd": odd,
    "empty": lambda i: Empty(),
    "parent": parent,
    "other shape every batch": lambda i: Plain(np.full(1 + i // 2, i), i),
    "other class every batch": lambda i: Plain(i, i) if i // 2 % 2 else Frozen(i, i),
    "requires_grad": lambda i: Frozen(torch.ones(2, requires_grad=True), i),
    "read-only": lambda i: Frozen(np.frombuffer(bytes([i]), np.uint8), i),
}


def collated(samples: list[Any]) -> Any:
    """Return the batch, one dataclass at a time, the leaves by torch."""
    first = samples[0]
    if dataclasses.is_dataclass(first):
        names = [each.name for each in dataclasses.fields(first)]
        batch = object.__new__(type(first))
        for name in names:
            object.__setattr__(batch, name, collated([getattr(sample, name) for sample in samples]))
        return batch
    if type(first) is dict:
        return {key: collated([sample[key] for sample in samples]) for key in first}
    if type(first) in (list, tuple):
        return [collated(list(values)) for values in zip(*samples, strict=True)]
    return default_collate([np.array(sample) if isinstance(sample, np.ndarray) else sample for sample in samples])


@pytest.mark.parametrize("make", DATACLASSES.values(), ids=DATACLASSES.keys())
def test_fields_are_batched_by_themselves(make: MakeSample) -> None:
    samples = [make(i) for i in range(5)]
    expected = [collated(samples[start : start + 2]) for start in (0, 2, 4)]
    for way in WAYS:
        with DataLoader(samples, 2, num_workers=way.num_workers) as loader:
            assert_same(way.face(loader), expected, str(way))


@pytest.mark.parametrize("make", DATACLASSES.values(), ids=DATACLASSES.keys())
def test_a_sample_by_itself_stays_as_it_is(make: MakeSample) -> None:
    samples = [make(i) for i in range(3)]
    for way in WAYS:
        with DataLoader(samples, None, num_workers=way.num_workers) as loader:
            assert [got is sample for got, sample in zip(way.face(loader), samples, strict=True)] == [True] * 3


@dataclass
class Output(collections.OrderedDict[str, Any]):
    """A mapping first, as the outputs of some libraries are."""

    logits: Any

    def __post_init__(self) -> None:
        self["logits"] = self.logits


@dataclass
class Number(int):
    unit: str = "m"


@dataclass
class Vector(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make", [lambda i: Output(grid(i)), lambda i: Number(), lambda i: torch.ones(2).as_subclass(Vector)]
)
def test_dataclasses_that_torch_has_an_answer_for_get_that(make: MakeSample) -> None:
    samples = [make(i) for i in range(5)]
    assert_parity(samples, batch_size=2)
    assert_parity(samples, batch_size=None)


def test_different_dataclasses_in_one_batch_are_an_error_that_names_both_samples() -> None:
    samples = [Plain(1, 2), Plain(3, 4), Frozen(5, 6)]
    for way in WAYS:
        with DataLoader(samples, 3, num_workers=way.num_workers) as loader:
            (error,) = way.face(loader)
        assert isinstance(error, SampleTypeError)
        assert "Samples index 0 and index 2 differ at the sample itself: a Plain against a Frozen" in str(error)


def test_a_field_that_cannot_be_read_is_the_error_of_that_batch() -> None:
    samples: list[Any] = [Checked(grid(i), i) for i in range(4)]
    del samples[2].area
    for way in WAYS:
        with DataLoader(samples, 2, num_workers=way.num_workers) as loader:
            batch, error = way.face(loader)
        assert batch.area.tolist() == [12, 12]
        assert isinstance(error, AttributeError)
        context = error_context(error)
        assert context is not None
        assert (context.index, context.stage) == ([2, 3], "collate")
