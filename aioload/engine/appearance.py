"""Appearance: what can be seen of objects and of what they are made of, so that a change is noticed later.

A pass that began early was loaded from the dataset as it was then. Nobody tells us of an attribute that is set, a
list that is appended to or a tensor that is written to, so we look. Long lists and large arrays are looked at in
places only; what is behind C code, a file or a global variable is not seen.
"""

import contextlib
import functools
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_MAX_PARTS = 2000
_MAX_ITEMS = 64
_MAX_ELEMENTS = 1024

_OPAQUE = (type, types.ModuleType, str, bytes, int, float, complex, type(None))


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


def _parts_of(roots: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield objects, nearest first, with what else is to be compared of them."""
    seen: set[int] = set()
    waiting = deque(roots)
    for _ in range(_MAX_PARTS):
        if not waiting:
            return
        part = waiting.popleft()
        detail, children = None, list[Any]()
        if id(part) not in seen and not isinstance(part, _OPAQUE):
            seen.add(id(part))
            with contextlib.suppress(Exception):  # an object that does not let itself be looked at
                detail, children = _look_at(part)
        yield part, detail
        waiting.extend(children)


def _look_at(part: Any) -> tuple[Any, list[Any]]:
    if isinstance(part, torch.Tensor):
        return None if part.is_inference() else part._version, []  # noqa: SLF001
    if isinstance(part, np.ndarray):
        # A map is not read for this.
        elements = None if isinstance(part, np.memmap) else part.flat[:: max(1, part.size // _MAX_ELEMENTS)]
        return None if elements is None else elements.tobytes(), []
    if isinstance(part, dict):
        items = itertools.islice(part.items(), _MAX_ITEMS)
        return len(part), [each for item in items for each in item] + _attributes_of(part)
    if isinstance(part, list | tuple | deque):
        ends = [*part] if len(part) <= _MAX_ITEMS else [part[i] for i in range(-_MAX_ITEMS // 2, _MAX_ITEMS // 2)]
        return len(part), ends + _attributes_of(part)
    if isinstance(part, set | frozenset):
        return len(part), list(itertools.islice(part, _MAX_ITEMS)) + _attributes_of(part)
    if isinstance(part, types.FunctionType):
        return None, [cell.cell_contents for cell in part.__closure__ or ()] + list(part.__defaults__ or ())
    if isinstance(part, types.MethodType):
        return None, [part.__self__]
    if isinstance(part, functools.partial):
        return None, [part.func, part.args, part.keywords]
    return None, _attributes_of(part)


def _attributes_of(part: Any) -> list[Any]:
    attributes = list(getattr(part, "__dict__", {}).values())
    for kind in type(part).__mro__:
        names = kind.__dict__.get("__slots__", ())
        attributes += [getattr(part, name, None) for name in ([names] if isinstance(names, str) else names)]
    return attributes
