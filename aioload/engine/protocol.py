"""Protocol: which of a dataset's methods give its samples, where it has several.

``location`` and ``decode`` are called in place of ``__getitem__`` only where they are meant to give the same. A class
that overrides the ``__getitem__`` of such a dataset, or wraps one and passes on what it does not have itself, would
otherwise be passed by in silence.
"""

import inspect
from typing import Any

import torch.utils.data as torch_data

from aioload.errors import ArgumentError
from aioload.readers import ReadPolicy

_STAGES = ("location", "decode")
_GETTERS = ("__getitem__", "__getitems__")


def has_method(thing: Any, name: str) -> bool:
    """Whether ``thing`` has something to call by that name, from wherever."""
    return callable(getattr(thing, name, None))


def has_stages(dataset: Any) -> bool:
    """Whether there are a ``location`` and a ``decode``, from wherever."""
    return all(has_method(dataset, stage) for stage in _STAGES)


def is_awaited(dataset: Any) -> bool:
    """Whether ``__getitem__`` is declared ``async def``."""
    return inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None))


def is_staged(dataset: Any, *, batched: bool) -> bool:
    """Whether samples are what ``location`` and ``decode`` give."""
    return has_stages(dataset) and not is_awaited(dataset) and overriding(dataset, batched=batched) is None


def overriding(dataset: Any, *, batched: bool) -> str | None:
    """Return the method that is called although there are stages: ``__getitem__``, or ``__getitems__`` for batches."""
    return next((name for name in _GETTERS[: 1 + batched] if _overrides_stages(dataset, name)), None)


def can_locate(dataset: Any) -> bool:
    """Whether ``location`` is that of an index's sample: a ``__getitem__`` that overrides may ask for another one."""
    if not has_method(dataset, "location"):
        return False
    if _depth(dataset, "__getitem__") is None:
        return True
    return _depth(dataset, "location") is not None and not (
        has_stages(dataset) and _overrides_stages(dataset, "__getitem__")
    )


def gives_many(dataset: Any, *, batched: bool) -> bool:
    """Whether a batch is asked for at once, by ``__getitems__``.

    That of torch's ``Subset`` and ``StackDataset`` only passes indices on, one by one unless what they are made of has
    one: samples that are asked for singly are the same, load side by side, and have random numbers of their own.
    """
    if not batched or not has_method(dataset, "__getitems__") or is_staged(dataset, batched=batched):
        return False
    if is_stock(dataset, torch_data.Subset):
        return gives_many(dataset.dataset, batched=batched)
    if is_stock(dataset, torch_data.StackDataset):
        members = dataset.datasets
        return any(_has_many(each) for each in (members.values() if isinstance(members, dict) else members))
    return True


def is_stock(dataset: Any, kind: Any) -> bool:
    """Whether ``dataset`` is torch's ``kind``, or of a subclass that leaves to it how samples are come by."""
    cls = type(dataset)
    if not issubclass(cls, kind) or any(_depth(dataset, stage) is not None for stage in _STAGES):
        return False
    return all(getattr(cls, name) is getattr(kind, name) for name in _GETTERS)


def check_reader(reader: Any, dataset: Any, *, batched: bool) -> None:
    """Refuse a reader that nothing can be read with, or that there is nothing to read for.

    Raises:
        ArgumentError: ``reader`` has no ``read``, or ``dataset`` not the two methods that it comes between, or another
            that is called in their place.
    """
    if reader is None:
        return
    if isinstance(reader, type) or not has_method(reader, "read"):
        message = f"reader must be an object with a method read(location, offset=0, length=None), got {reader!r}"
        raise ArgumentError(message)
    _check_staged(dataset, f"reader={reader!r}", "reads in between", batched=batched)


def check_cache(cache: Any, dataset: Any, *, batched: bool) -> None:
    """Refuse a cache that nothing can be looked for in, or that there is nothing to look for in.

    Raises:
        ArgumentError: ``cache`` has no ``get`` and ``put``, or ``dataset`` not the two methods that it comes between,
            or another that is called in their place.
    """
    if cache is None:
        return
    if isinstance(cache, type) or not (has_method(cache, "get") and has_method(cache, "put")):
        message = (
            "cache must be a DiskCache, a MemoryCache or an object with the methods get(location) and "
            f"put(location, data), got {cache!r}"
        )
        raise ArgumentError(message)
    _check_staged(dataset, f"cache={cache!r}", "keeps what is read in between", batched=batched)


def check_read(read: Any, dataset: Any, *, batched: bool) -> None:
    """Refuse a policy of reads, other than the default, where nothing is read that it could be for.

    Raises:
        ArgumentError: ``dataset`` has not the two methods that reads come between, or another is called in their place.
    """
    if isinstance(read, ReadPolicy) and read != ReadPolicy():
        _check_staged(dataset, f"read={read!r}", "says how files are read in between", batched=batched)


def _check_staged(dataset: Any, argument: str, does: str, *, batched: bool) -> None:
    inner = dataset
    while is_stock(inner, torch_data.Subset):
        inner = inner.dataset
    if isinstance(dataset, torch_data.IterableDataset):
        what = "which is iterated over"
    elif is_awaited(inner):
        what = "whose __getitem__ is async and reads by itself"
    elif not has_stages(inner):
        what = "which lacks one of them"
    elif (name := overriding(inner, batched=batched)) is not None:
        what = f"whose {name} is called instead: {_explain_overriding(inner, name)}"
    else:
        return
    message = (
        f"{argument} is for a dataset with location(index) and decode(data, index), and {does}; "
        f"got {type(dataset).__name__}, {what}. Leave it out."
    )
    raise ArgumentError(message)


def _has_many(member: Any) -> bool:
    """Whether a member of a ``StackDataset``, which knows of no stages, has a ``__getitems__`` that must be called."""
    if is_stock(member, torch_data.Subset):
        return _has_many(member.dataset)
    if is_stock(member, torch_data.StackDataset):
        return gives_many(member, batched=True)
    return has_method(member, "__getitems__")


def _overrides_stages(dataset: Any, name: str) -> bool:
    """Whether the method ``name`` may give something else than ``location`` and ``decode``, both of which there are.

    It is theirs where the class that has it defines both, or where they are defined below it; it is not where it is
    defined below both, nor where its class changes one of the stages of a dataset that is complete without it.
    """
    depth, depths = _depth(dataset, name), [_depth(dataset, stage) for stage in _STAGES]
    if depth is None:
        return False
    if all(each is None or each > depth for each in depths) or None in depths:
        return True
    classes = type(dataset).__mro__
    if depth >= 0 and all(stage in vars(classes[depth]) for stage in _STAGES):
        return False
    behind = classes[depth + 1 :]
    return all(_defined(behind, stage) for stage in _STAGES) and any(_defined(behind, getter) for getter in _GETTERS)


def _depth(dataset: Any, name: str) -> int | None:
    """Return how far down the method resolution order a name is defined, -1 on the instance; ``None`` if nowhere."""
    if name != "__getitem__":  # which Python looks up on the type alone
        try:
            if name in object.__getattribute__(dataset, "__dict__"):
                return -1
        except AttributeError:  # it has slots
            pass
    return next((depth for depth, cls in enumerate(type(dataset).__mro__) if _defined((cls,), name)), None)


def _defined(classes: tuple[type, ...], name: str) -> bool:
    """Whether one of the classes defines a name, and not just says that there should be something by it."""
    for cls in classes:
        value = vars(cls).get(name)
        is_stub = cls is torch_data.Dataset or vars(cls).get("_is_protocol", False)
        if value is not None and not is_stub and not getattr(value, "__isabstractmethod__", False):
            return True
    return False


def _explain_overriding(dataset: Any, name: str) -> str:
    """Return why the method is called, for a message."""
    depths = [_depth(dataset, stage) for stage in _STAGES]
    if None in depths:
        return f"{type(dataset).__name__} has one of its own, and finds location or decode by __getattr__ alone"
    depth = _depth(dataset, name)
    owner = type(dataset).__mro__[depth] if depth is not None and depth >= 0 else type(dataset)
    return f"{owner.__name__} overrides it without defining location and decode as well"
