"""Changes noticed: a pass that began early is loaded anew whatever has been changed that samples are made of.

Here are the things that do not say of themselves that they have been changed; ``test_persistent`` has the others.
"""

import array
import ctypes
import functools
import mmap
import multiprocessing
import types
from collections import deque
from collections.abc import Callable
from multiprocessing import sharedctypes
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.data

from aioload import DataLoader
from aioload.testing import Gates

SIZE = 12
GATES = Gates(opened=True)

number = 0
table = {"by": 0}
shared_number = multiprocessing.Value("i", 0)
settings = types.ModuleType("settings")
settings.number = 0  # type: ignore[attr-defined]
replaceable: Callable[[int], int] = lambda value: value  # noqa: E731


class Settings:
    number = 0
    table: ClassVar = {"by": [0]}


class Point(ctypes.Structure):
    _fields_: ClassVar = [("x", ctypes.c_int), ("y", ctypes.c_double)]


def helper() -> int:
    return sum(number for _ in range(1))


class Numbers(torch.utils.data.Dataset[int]):
    """Its samples are 100 times its number, plus the index."""

    def number(self) -> int:
        raise NotImplementedError

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        GATES.pass_through(index)
        return 100 * self.number() + index


class Bytes(Numbers):
    def __init__(self, size: int = 1) -> None:
        self.bytes = bytearray(size)
        self.view = memoryview(bytearray(size))
        self.ints = array.array("i", [0] * size)
        self.map = memoryview(mmap.mmap(-1, size))  # as multiprocessing.shared_memory has one

    def number(self) -> int:
        return self.bytes[0] + self.view[0] + self.ints[0] + int(self.map[0])


def change_bytes(dataset: Any) -> None:
    dataset.bytes[0] += 1


def change_view(dataset: Any) -> None:
    dataset.view[0] += 1


def change_ints(dataset: Any) -> None:
    dataset.ints[0] += 1


def change_map(dataset: Any) -> None:
    dataset.map[0] += 1


class Shared(Numbers):
    def __init__(self) -> None:
        self.value = multiprocessing.Value("i", 0)
        self.values = multiprocessing.Array("d", 3)
        self.raw = sharedctypes.RawValue("i", 0)
        self.raws = sharedctypes.RawArray("i", 3)
        self.unlocked = multiprocessing.Value("i", 0, lock=False)
        self.point = Point()
        self.shared_point: Any = multiprocessing.Value(Point)
        self.tensor = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def number(self) -> int:
        total = self.value.value + self.values[1] + self.raw.value + self.raws[1] + self.unlocked.value
        total += self.point.x + self.shared_point.x + self.tensor[1].item()
        return int(total)


def change_value(dataset: Any) -> None:
    with dataset.value.get_lock():
        dataset.value.value += 1


def change_values(dataset: Any) -> None:
    dataset.values[1] += 1


def change_raw(dataset: Any) -> None:
    dataset.raw.value += 1


def change_raws(dataset: Any) -> None:
    dataset.raws[1] += 1


def change_unlocked(dataset: Any) -> None:
    dataset.unlocked.value += 1


def change_point(dataset: Any) -> None:
    dataset.point.x += 1


def change_shared_point(dataset: Any) -> None:
    dataset.shared_point.x += 1


def change_shared_tensor(dataset: Any) -> None:
    dataset.tensor.numpy()[1] += 1


class Tensors(Numbers):
    def __init__(self) -> None:
        self.tensor = torch.zeros(3, dtype=torch.int64)
        self.half = torch.zeros(3, dtype=torch.bfloat16)
        self.layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.strided = torch.zeros(100, 200).T[::2]
        with torch.inference_mode():
            self.inferred = torch.zeros(2)
        self.objects = np.array([[0], 0], dtype=object)

    def number(self) -> int:
        total = self.tensor[1].item() + self.half[1].item() + self.layer.weight[0, 1].item()
        total += self.strided[-1, 0].item() + self.inferred[1].item() + self.objects[0][0]
        return int(total)


def change_behind_a_tensor(dataset: Any) -> None:
    dataset.tensor.numpy()[1] += 1


def change_behind_a_half(dataset: Any) -> None:
    dataset.half.view(torch.int16).numpy()[:] = 0x4000  # 2.0


def change_behind_a_layer(dataset: Any) -> None:
    dataset.layer.weight.detach().numpy()[0, 1] += 1


def change_behind_a_strided(dataset: Any) -> None:
    dataset.strided.numpy()[:] += 1


def change_inferred(dataset: Any) -> None:
    with torch.inference_mode():
        dataset.inferred += 1


def change_in_an_object_array(dataset: Any) -> None:
    dataset.objects[0][0] += 1


class Base(Numbers):
    inherited = 0
    inherited_table: ClassVar = [[0]]


class Classes(Base):
    own = 0
    __slots__ = ()

    def number(self) -> int:
        return self.own + self.inherited + self.inherited_table[0][0] + self.calculated() + self.also

    @staticmethod
    def calculated() -> int:
        return 0

    @property
    def also(self) -> int:
        return self.from_global() + Settings.number + Settings.table["by"][0]

    @classmethod
    def from_global(cls) -> int:
        return number


def change_class(_: Any) -> None:
    Classes.own += 1


def change_base(_: Any) -> None:
    Base.inherited += 1


def change_inside_base(_: Any) -> None:
    Base.inherited_table[0][0] += 1


def replace_method(_: Any) -> None:
    now = Classes.calculated()
    Classes.calculated = staticmethod(lambda: now + 1)  # type: ignore[method-assign]


def change_another_class(_: Any) -> None:
    Settings.number += 1


def change_inside_another_class(_: Any) -> None:
    Settings.table["by"][0] += 1


class Globals(Numbers):
    def __init__(self) -> None:
        self.transform = functools.partial(self.transformed, by=1)

    def transformed(self, value: int, *, by: int) -> int:
        return value + by + helper()

    def number(self) -> int:
        now = self.transform(table["by"]) + int(settings.number) + shared_number.value
        return replaceable(now)


def change_global(_: Any) -> None:
    global number
    number += 1


def change_table(_: Any) -> None:
    table["by"] += 1


def change_module(_: Any) -> None:
    settings.number += 1  # type: ignore[attr-defined]


def change_shared_global(_: Any) -> None:
    shared_number.value += 1


def replace_function(_: Any) -> None:
    global replaceable
    before = replaceable
    replaceable = lambda value: before(value) + 1  # noqa: E731


class Long(Numbers):
    """As many items as are all looked at."""

    length = 10_000

    def __init__(self) -> None:
        self.numbers = [0] * self.length
        self.keyed = dict.fromkeys(range(self.length), 0)
        self.queue = deque(self.numbers)
        self.members = set(range(self.length - 1))
        self.pair = ([[0] for _ in range(500)], 0)

    def number(self) -> int:
        middle = self.length // 2
        return self.numbers[middle] + self.keyed[middle] + self.queue[middle] + int(middle not in self.members)


def change_the_middle_of_a_list(dataset: Any) -> None:
    dataset.numbers[dataset.length // 2] += 1


def change_the_middle_of_a_table(dataset: Any) -> None:
    dataset.keyed[dataset.length // 2] += 1


def change_the_middle_of_a_queue(dataset: Any) -> None:
    dataset.queue[dataset.length // 2] += 1


def change_one_of_many_members(dataset: Any) -> None:
    dataset.members.remove(dataset.length // 2)
    dataset.members.add(dataset.length)


class Equal:
    """One is equal to any other."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


class Equals(Numbers):
    def __init__(self) -> None:
        self.items = [Equal(0) for _ in range(500)]

    def number(self) -> int:
        return self.items[250].number


def replace_by_an_equal(dataset: Any) -> None:
    dataset.items[250] = Equal(1)


class Arrays(Numbers):
    def __init__(self) -> None:
        self.items = [np.zeros(2, int) for _ in range(500)]

    def number(self) -> int:
        return int(self.items[250][0])


def replace_array(dataset: Any) -> None:
    dataset.items[250] = np.ones(2, int)  # which have no truth value when compared


CHANGES: dict[Callable[[], Numbers], list[Callable[[Any], None]]] = {
    Bytes: [change_bytes, change_view, change_ints, change_map],
    Shared: [
        change_value,
        change_values,
        change_raw,
        change_raws,
        change_unlocked,
        change_point,
        change_shared_point,
        change_shared_tensor,
    ],
    Tensors: [
        change_behind_a_tensor,
        change_behind_a_half,
        change_behind_a_layer,
        change_behind_a_strided,
        change_inferred,
        change_in_an_object_array,
    ],
    Classes: [
        change_class,
        change_base,
        change_inside_base,
        replace_method,
        change_another_class,
        change_inside_another_class,
        change_global,
    ],
    Globals: [change_global, change_table, change_module, change_shared_global, replace_function],
    Long: [
        change_the_middle_of_a_list,
        change_the_middle_of_a_table,
        change_the_middle_of_a_queue,
        change_one_of_many_members,
    ],
    Equals: [replace_by_an_equal],
    Arrays: [replace_array],
}


@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(make, change, id=f"{getattr(make, '__name__', '')}-{change.__name__}")
        for make, changes in CHANGES.items()
        for change in changes
    ],
)
def test_a_change_is_seen_by_every_sample_of_the_next_pass(
    make: Callable[[], Numbers], change: Callable[[Any], None]
) -> None:
    dataset = make()
    with DataLoader(dataset, 2, num_workers=1, persistent_workers=True) as loader:
        begun = len(GATES.started)
        before = [batch.tolist() for batch in loader]
        GATES.wait_num_started(begun + SIZE + 4)  # the next pass has begun
        change(dataset)
        expected = [[dataset[index], dataset[index + 1]] for index in range(0, SIZE, 2)]
        assert expected[0] != before[0]
        assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize("make", CHANGES)
def test_nothing_of_this_looks_changed_by_being_used(make: Callable[[], Numbers]) -> None:
    with DataLoader(make(), 2, num_workers=2, persistent_workers=True) as loader:
        begun = len(GATES.started)
        for passes in range(1, 4):
            assert len(list(loader)) == SIZE // 2
            GATES.wait_num_started(begun + passes * SIZE + 8)
            assert len(GATES.started) == begun + passes * SIZE + 8  # none was loaded twice
