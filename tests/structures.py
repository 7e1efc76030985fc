"""Structures: samples of every kind that torch's loader has an answer for, an error among them."""

import array
import collections
import enum
import fractions
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

MakeSample: TypeAlias = Callable[[int], Any]

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
NUMPY_DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "l", "q", "Q"]


class Pair(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class MyTensor(torch.Tensor):
    pass


class MyArray(np.ndarray[Any, Any]):
    pass


class MyStr(str):
    pass


class MyList(list[Any]):
    pass


class MyDict(dict[str, Any]):
    def __init__(self, *args: Any, origin: str = "nowhere") -> None:
        super().__init__(*args)
        self.origin = origin


class FixedMapping(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_of = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class OpenMapping(FixedMapping, MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of = {**self.items_of, key: value}

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError


class UncopiableMapping(OpenMapping):
    def __copy__(self) -> Any:
        raise TypeError


class FixedSequence(Sequence[Any]):
    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)


class TwoArguments(FixedSequence):
    def __init__(self, one: Any, two: Any) -> None:
        super().__init__([one, two])


class OpenSequence(FixedSequence, MutableSequence[Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        self.parts = [*self.parts[:index], value, *self.parts[index + 1 :]]

    def __delitem__(self, index: Any) -> None:
        raise NotImplementedError

    def insert(self, index: int, value: Any) -> None:
        raise NotImplementedError


def nested(*sizes: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.zeros(size) for size in sizes])


THING = object()


def grid(i: int) -> "np.ndarray[Any, Any]":
    return np.arange(12.0).reshape(3, 4) + i


def parted(i: int, one: Any, *others: Any) -> Any:
    """Return ``one`` for most samples and one of the ``others`` for the rest."""
    return others[i % 2 % len(others)] if i % 3 == 2 else one


def read_only(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    values.flags.writeable = False
    return values


STRUCTURES: dict[str, MakeSample] = {
    "arrays of every dtype": lambda i: {kind: grid(i).astype(kind) for kind in NUMPY_DTYPES},
    "tensors of every dtype": lambda i: {str(kind): torch.tensor(grid(i) / 3).to(kind) for kind in TORCH_DTYPES},
    "complex32": lambda i: torch.tensor(grid(i)).to(torch.complex32),
    "odd floats": lambda i: (float("nan"), -0.0, np.float32("inf"), np.array([np.nan, -0.0]) * i),
    "numpy scalars": lambda i: {kind: np.dtype(kind).type(i) for kind in NUMPY_DTYPES if kind not in ("u8", "Q")},
    "np.uint64 scalar": np.uint64,
    "np.timedelta64": lambda i: np.timedelta64(i, "s"),
    "np.datetime64": lambda i: np.datetime64(i, "s"),
    "np.longdouble": np.longdouble,
    "scalars without dimensions": lambda i: (np.array(i), torch.tensor(i), np.array(i > 2), torch.tensor(i / 2)),
    "zero sizes": lambda i: (np.zeros((0, 3)), torch.zeros(2, 0), np.zeros(0, "u1"), i),
    "not contiguous": lambda i: (grid(i).T, grid(i)[::2, ::3], torch.tensor(grid(i)).t(), torch.tensor(grid(i))[:, 1]),
    "fortran order": lambda i: np.asfortranarray(grid(i)),
    "expanded": lambda i: (torch.tensor([i]).expand(3), np.broadcast_to(np.array([i]), (2, 3)).copy()),
    "channels last": lambda i: torch.tensor(grid(i)).reshape(2, 2, 3).permute(2, 0, 1),
    "read-only": lambda i: (np.frombuffer(bytes([i, 7]), np.uint8), {"a": read_only(grid(i))}),
    "read-only in subclasses": lambda i: collections.OrderedDict(a=FixedSequence([read_only(grid(i))])),
    "array subclass": lambda i: grid(i).view(MyArray),
    "masked array": lambda i: np.ma.MaskedArray([i, 1, 2], mask=[False, True, False]),
    "object array": lambda i: np.array([i, None]),
    "string array": lambda i: np.array(["a", "b"]),
    "records": lambda i: np.zeros(2, [("a", "u1"), ("b", "f4")]),
    "foreign byte order": lambda i: grid(i).astype(">f4"),
    "requires_grad": lambda i: torch.tensor(grid(i), requires_grad=True),
    "requires_grad in some": lambda i: torch.tensor(grid(i), requires_grad=i == 1),
    "bfloat16 with requires_grad in some": lambda i: torch.ones(2, dtype=torch.bfloat16).requires_grad_(i == 1),
    "conjugate view": lambda i: torch.tensor([i + 1j, i - 2j]).conj(),
    "conjugate view in some": lambda i: parted(i, torch.tensor([i + 1j]), torch.tensor([i + 1j]).conj()),
    "negative view": lambda i: torch.tensor([i + 1j]).conj().imag,
    "tensor subclass": lambda i: torch.tensor(grid(i)).as_subclass(MyTensor),
    "tensor subclass in some": lambda i: parted(i, torch.ones(2), torch.ones(2).as_subclass(MyTensor)),
    "parameter": lambda i: torch.nn.Parameter(torch.tensor(grid(i))),
    "sparse": lambda i: torch.eye(2 + i).to_sparse(),
    "sparse csr": lambda i: torch.eye(2).to_sparse_csr(),
    "sparse in some": lambda i: parted(i, torch.eye(2), torch.eye(2).to_sparse()),
    "nested tensor": lambda i: nested(2, 1 + i),
    "nested tensor in some": lambda i: parted(i, torch.zeros(2), nested(2)),
    "quantized": lambda i: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
    "meta device": lambda i: torch.zeros(2, device="meta"),
    "meta device in some": lambda i: parted(i, torch.zeros(2), torch.zeros(2, device="meta")),
    "ints": lambda i: i,
    "floats": lambda i: i / 3,
    "bools": lambda i: i % 2 == 0,
    "ints and floats": lambda i: i if i % 2 else i / 3,
    "floats and ints": lambda i: i / 3 if i % 2 else i,
    "bools and ints": lambda i: i if i % 2 else True,
    "numpy and python": lambda i: np.int64(i) if i % 2 else i,
    "the largest ints": lambda i: (2**63 - 1 - i, -(2**63) + i),
    "too large an int": lambda i: 2**63 if i == 3 else i,
    "too large ints": lambda i: -(2**63) - 1,
    "enum": lambda i: (Colour.RED, Colour.BLUE, i)[i % 3],
    "fraction": lambda i: fractions.Fraction(i, 3),
    "complex number": lambda i: complex(i),
    "none": lambda i: None,
    "none in a dict": lambda i: {"a": i, "b": None},
    "set": lambda i: {i},
    "object": lambda i: THING,
    "class": lambda i: Pair,
    "str": lambda i: f"s{i}",
    "bytes": lambda i: b"s%d" % i,
    "str and bytes": lambda i: f"s{i}" if i % 2 else b"s",
    "str subclass": lambda i: MyStr(i),
    "str subclass in some": lambda i: parted(i, "s", MyStr(i)),
    "np.str_": lambda i: (np.str_(i), np.bytes_(b"s")),
    "str and numbers": lambda i: i if i % 2 else "s",
    "numbers and str": lambda i: "s" if i % 2 else i,
    "bytearray": lambda i: bytearray([i, 2]),
    "memoryview": lambda i: memoryview(bytes([i, 2])),
    "tuple": lambda i: (grid(i), i),
    "list": lambda i: [torch.tensor(grid(i)), f"s{i}"],
    "dict": lambda i: {"image": grid(i), "label": i, "name": f"s{i}", 7: True},
    "named tuple": lambda i: Pair(grid(i), f"s{i}"),
    "nested": lambda i: {"a": [(i, f"s{i}"), Pair({"b": f"s{i}"}, [b"s", np.float32(i)])], "c": ((grid(i),),)},
    "OrderedDict": lambda i: collections.OrderedDict(b=i, a="s"),
    "defaultdict": lambda i: collections.defaultdict(int, a=i),
    "defaultdict without a key": lambda i: collections.defaultdict(int, {"a": i} if i % 2 == 0 else {}),
    "Counter": lambda i: collections.Counter("a" * (i + 1)),
    "UserDict": lambda i: collections.UserDict(a=i),
    "UserList": lambda i: collections.UserList([i, grid(i)]),
    "mapping proxy": lambda i: types.MappingProxyType({"a": i}),
    "dict subclass": lambda i: MyDict({"a": grid(i)}, origin=f"s{i}"),
    "list subclass": lambda i: MyList([i, grid(i)]),
    "fixed mapping": lambda i: FixedMapping({"a": i, "b": "s"}),
    "open mapping": lambda i: OpenMapping({"a": i, "b": "s"}),
    "uncopiable mapping": lambda i: UncopiableMapping({"a": i}),
    "fixed sequence": lambda i: FixedSequence([i, "s"]),
    "open sequence": lambda i: OpenSequence([i, "s"]),
    "sequence of two arguments": lambda i: TwoArguments(i, "s"),
    "deque": lambda i: collections.deque([i, 2]),
    "range": lambda i: range(i, i + 2),
    "array.array": lambda i: array.array("i", [i]),
    "torch.Size": lambda i: torch.Size([i, 2]),
    "struct sequence": lambda i: torch.ones(2, 2).max(0),
    "empty containers": lambda i: ((), [], {}, Nothing(), collections.OrderedDict(), [()], i),
    "nothing but empty": lambda i: (),
    "empty dict": lambda i: {},
    "keys in another order": lambda i: {"a": i, "b": 2} if i % 2 else {"b": 2, "a": i},
    "keys in another order every batch": lambda i: {"a": i, "b": 2} if i // 2 % 2 else {"b": 2, "a": i},
    "a key too many": lambda i: {"a": i} if i % 2 == 0 else {"a": i, "b": 2},
    "a missing key": lambda i: {"a": i} if i % 2 else {"a": i, "b": 2},
    "dict and tuple": lambda i: {"a": i} if i % 2 else (i,),
    "tuple and list": lambda i: (i, 2) if i % 2 else [i, 2],
    "tuple and number": lambda i: i if i % 2 else (i,),
    "named tuple and tuple": lambda i: (i, 2) if i % 2 else Pair(i, 2),
    "unequal lengths": lambda i: [1] * (1 + i % 2),
    "unequal lengths, named": lambda i: Pair(i, [1] * (1 + i % 2)),
    "ragged arrays": lambda i: np.zeros((2, 1 + i)),
    "ragged tensors": lambda i: {"a": 1, "b": torch.zeros(1 + i // 3)},
    "other shape every batch": lambda i: np.full((2, 1 + i // 2), i),
    "other structure every batch": lambda i: (i, "s") if i // 2 % 2 else {"a": grid(i)},
    "other dtype": lambda i: grid(i).astype("i4" if i % 2 else "f8"),
    "other dtype of tensors": lambda i: torch.tensor(grid(i)).to(torch.int32 if i % 2 else torch.bfloat16),
    "arrays and tensors": lambda i: grid(i) if i % 2 == 0 else torch.tensor(grid(i)),
    "tensors and arrays": lambda i: torch.tensor(grid(i)) if i % 2 == 0 else grid(i),
    "arrays and numbers": lambda i: np.array(i) if i % 2 == 0 else i,
    "tensors and numbers": lambda i: torch.tensor(i) if i % 2 == 0 else i,
    "a field of another type in one": lambda i: (i, parted(i, grid(i), "s"), grid(i)),
}

# The first of each warns, once, and the last imports a thousand modules: done before the first test, they are not
# looked through for leaks after each.
with warnings.catch_warnings(action="ignore"):
    nested(1)
    torch.zeros(1, dtype=torch.complex32)
    torch.eye(2).to_sparse_csr()
    torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)
    torch.stack([torch.zeros(2, device="meta")])
