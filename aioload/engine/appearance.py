"""Appearance: what can be seen of objects and of what they are made of, so that a change is noticed later.

A pass that began early was loaded from the dataset as it was then. Nobody tells us of an attribute that is set, a
list that is appended to or an array that is written to, so we look: at attributes, items and elements, at the classes
of objects, and at the globals that functions name, where class and function are the user's own. Long lists and large
arrays are looked at in places only; objects that are globals are only asked whether they are the same, unless they are
plain containers or numbers in shared memory; what is behind C code, a file or another process is not seen.
"""

import array
import contextlib
import ctypes
import functools
import itertools
import mmap
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, TypeAlias

import numpy as np
import torch

_MAX_PARTS = 2000
_MAX_CHILDREN = 64  # items of one container that are looked into
_MAX_ITEMS = 10_000  # which are compared: 10,000 take 0.05 ms
_MAX_STRICT_ITEMS = 1000  # `is` costs 0.03 us an item, list equality 0.002
_NUM_SAMPLED_ITEMS = 256
_MAX_BYTES = 16 << 10  # of an array that is compared as a whole
_MAX_ELEMENTS = 1024
_LARGE_BYTES = 64 << 20  # such a tensor may be a map of a file, where each element is a read
_MAX_ELEMENTS_OF_LARGE = 64

_OPAQUE = frozenset((types.ModuleType, str, bytes, int, bool, float, complex, type(None)))
_PLAIN = frozenset((list, tuple, dict, set, frozenset, deque, bytearray, array.array, torch.Tensor))
_CData: Any = ctypes.Structure.__mro__[1]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_LIBRARIES = frozenset(("aioload", "torch", "torchvision", "torchaudio", "numpy", "PIL", "cv2", "scipy", "pandas"))

_Look: TypeAlias = tuple[Any, list[Any]]
"""What is to be compared of an object itself, and what else to look at."""


class Appearance:
    """How objects looked when this was made; whatever may be changed about them is compared by identity."""

    def __init__(self, *roots: Any) -> None:
        self._parts = list(_parts_of(roots))  # which keeps them, so no other object can take an identity over

    def is_still(self, *roots: Any) -> bool:
        """Whether the objects look the same now."""
        now = list(_parts_of(roots))
        return len(now) == len(self._parts) and all(
            one is other and detail == other_detail
            for (one, detail), (other, other_detail) in zip(self._parts, now, strict=True)
        )


class _Items:
    """Objects that are compared by identity; very many of them by equality, where they are not identical."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Items) or len(self._items) != len(other._items):
            return False
        if len(self._items) <= _MAX_STRICT_ITEMS:
            return all(map(operator.is_, self._items, other._items))
        try:
            return self._items == other._items
        except Exception:  # arrays, say, which say of each element whether it is equal
            return False

    __hash__ = None  # type: ignore[assignment]


def _parts_of(roots: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield objects, nearest first, with what else is to be compared of them."""
    seen: set[int] = set()
    waiting = deque(roots)
    for _ in range(_MAX_PARTS):
        if not waiting:
            return
        part = waiting.popleft()
        if type(part) in _OPAQUE or id(part) in seen:
            yield part, None
            continue
        seen.add(id(part))
        try:
            detail, children = _look_at(part)
        except Exception:  # an object that does not let itself be looked at
            detail, children = None, []
        yield part, detail
        waiting.extend(children)


def _look_at(part: Any) -> _Look:
    look = _LOOK_AT_EXACTLY.get(type(part))
    if look is not None:
        return look(part)
    for kinds, look in _LOOKS:
        if isinstance(part, kinds):
            return look(part)
    return None, _attributes_of(part)


# Numbers in memory.


def _look_at_tensor(part: torch.Tensor) -> _Look:
    version = None if part.is_inference() else part._version  # noqa: SLF001
    elements = None
    if part.device.type == "cpu" and part.layout is torch.strided:
        with contextlib.suppress(Exception):  # quantized, conjugated, or a subclass that will not have it
            bits = part.detach().view(_BITS[part.element_size()]).numpy()  # NumPy does not know all the types
            elements = _sample(bits, _MAX_ELEMENTS if bits.nbytes <= _LARGE_BYTES else _MAX_ELEMENTS_OF_LARGE)
    return (version, elements), _attributes_of(part)


def _look_at_array(part: np.ndarray[Any, Any]) -> _Look:
    if part.dtype.hasobject:
        return part.shape, part.flat[:: max(1, part.size // _MAX_CHILDREN)].tolist()
    # A map is not read for this.
    return None if isinstance(part, np.memmap) else _sample(part), []


def _look_at_bytes(part: "bytearray | array.array[Any]") -> _Look:
    # A slice, which is made in one step: a view would keep other threads from resizing it.
    size = len(part)
    step = 1 if size <= _MAX_BYTES else size // _MAX_ELEMENTS
    return (size, bytes(part[::step])), _attributes_of(part)


def _look_at_view(part: memoryview) -> _Look:
    if isinstance(part.obj, mmap.mmap) and part.nbytes > _MAX_BYTES:  # of a file, perhaps
        return None, []
    return _sample(np.asarray(part)), []


def _look_at_c_data(part: Any) -> _Look:
    return _sample(np.frombuffer(part, np.uint8)), []


def _sample(values: np.ndarray[Any, Any], max_elements: int = _MAX_ELEMENTS) -> bytes:
    if values.nbytes <= _MAX_BYTES:
        return values.tobytes()
    return values.flat[:: max(1, values.size // max_elements)].tobytes()


# Containers.


def _look_at_dict(part: dict[Any, Any]) -> _Look:
    items = list(itertools.islice(part.items(), _MAX_CHILDREN))
    children = [each for item in items for each in item] + _attributes_of(part)
    if len(part) <= _MAX_CHILDREN:
        return len(part), children
    if len(part) <= _MAX_ITEMS:
        return _Items([*part, *part.values()]), children
    last = itertools.islice(reversed(part.items()), _MAX_CHILDREN)
    return (len(part), _Items([each for item in last for each in item])), children


def _look_at_sequence(part: "list[Any] | tuple[Any, ...] | deque[Any]") -> _Look:
    if len(part) <= _MAX_CHILDREN:
        return len(part), [*part, *_attributes_of(part)]
    half = _MAX_CHILDREN // 2
    children = [*(part[i] for i in range(-half, half)), *_attributes_of(part)]
    if len(part) <= _MAX_ITEMS:
        return _Items([*part]), children
    if isinstance(part, deque):  # whose middle is far away
        return len(part), children
    return (len(part), _Items([*part[:: len(part) // _NUM_SAMPLED_ITEMS]])), children


def _look_at_set(part: "set[Any] | frozenset[Any]") -> _Look:
    children = list(itertools.islice(part, _MAX_CHILDREN)) + _attributes_of(part)
    return (len(part), _Items([*part]) if _MAX_CHILDREN < len(part) <= _MAX_ITEMS else None), children


# Code.


def _look_at_function(part: types.FunctionType) -> _Look:
    children = [cell.cell_contents for cell in part.__closure__ or ()] + list(part.__defaults__ or ())
    children += [*(part.__kwdefaults__ or {}).values(), *part.__dict__.values()]
    if not _is_of_user(part.__globals__.get("__name__")):
        return part.__code__, children
    named = _globals_of(part)
    children += [each for each in named if isinstance(each, _OPEN_GLOBALS)]
    return (part.__code__, _Items(named)), children


def _globals_of(function: types.FunctionType) -> list[Any]:
    """Return what the names in the function stand for, among them what it takes from modules of the user's."""
    names = _names_in(function.__code__)
    found: list[Any] = []
    spaces = [function.__globals__]
    for space in spaces:
        for name in names:
            if name not in space:
                continue
            value = space[name]
            found.append(value)
            is_module = isinstance(value, types.ModuleType) and _is_of_user(value.__name__)
            if is_module and not any(vars(value) is each for each in spaces):
                spaces.append(vars(value))
    return found


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *itertools.chain.from_iterable(inner))))


def _look_at_class(part: type) -> _Look:
    members = [vars(base).items() for base in part.__mro__ if _is_of_user(base.__module__)]
    is_own = (types.FunctionType, staticmethod, classmethod, property)
    return None, [
        value
        for name, value in itertools.chain.from_iterable(members)
        if isinstance(value, is_own) or not (name.startswith("__") and name.endswith("__"))
    ]


@functools.lru_cache(4096)
def _is_of_user(module: Any) -> bool:
    """Whether the module of this name may have state that samples depend on; libraries are taken to have none."""
    root = module.partition(".")[0] if isinstance(module, str) else "builtins"
    return root not in sys.stdlib_module_names and root not in _LIBRARIES


def _attributes_of(part: Any) -> list[Any]:
    kind = type(part)
    if kind in _PLAIN:
        return []
    attributes = list(getattr(part, "__dict__", {}).values())
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        attributes += [getattr(part, name, None) for name in ([names] if isinstance(names, str) else names)]
    if _is_of_user(kind.__module__):
        attributes.append(kind)
    return attributes


_LOOKS: tuple[tuple[Any, Callable[[Any], _Look]], ...] = (
    (torch.Tensor, _look_at_tensor),
    (np.ndarray, _look_at_array),
    (dict, _look_at_dict),
    ((list, tuple, deque), _look_at_sequence),
    ((set, frozenset), _look_at_set),
    (types.FunctionType, _look_at_function),
    (types.MethodType, lambda part: (None, [part.__self__, part.__func__])),
    (functools.partial, lambda part: (None, [part.func, part.args, part.keywords])),
    (type, _look_at_class),
    (property, lambda part: (None, [part.fget])),
    ((staticmethod, classmethod), lambda part: (None, [part.__func__])),
    (SynchronizedBase, lambda part: (None, [part.get_obj()])),
    ((bytearray, array.array), _look_at_bytes),
    (memoryview, _look_at_view),
    (_CData, _look_at_c_data),
)

_LOOK_AT_EXACTLY = {kind: look for kinds, look in _LOOKS for kind in (kinds if isinstance(kinds, tuple) else (kinds,))}

_OPEN_GLOBALS = tuple(_LOOK_AT_EXACTLY.keys() - {types.MethodType, property, staticmethod, classmethod})
