"""Fingerprints: what a saved state and the sampler it is given to must agree in, whoever wrote the sampler."""

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioload.errors import ArgumentError
from aioload.samplers.arguments import column, digest
from aioload.samplers.seekable import JSON, Seekable

MAX_LOOKED_AT = 1 << 16
"""Of more weights or indices than this, as many, evenly spaced, are looked at: a state is taken in milliseconds."""


def fingerprint_of(sampler: Any) -> dict[str, JSON]:
    """Return what tells a sampler from another: all that its items depend on, as far as its kind is known.

    The rank is not in it, nor where a generator is: a state fits any rank.
    """
    if isinstance(sampler, Seekable):
        return dict(sampler.fingerprint())
    found: dict[str, JSON] = {"name": type(sampler).__name__}
    look = _LOOKS.get(type(sampler))
    if look is None:
        return found | _of_unknown(sampler)
    return found | {"length": length_of(sampler)} | look(sampler)


def length_of(sized: Any) -> int | None:
    """Return the length of what may have none."""
    try:
        return len(sized)
    except Exception:  # not everything that is iterated over has a length
        return None


def checksum(entry: Any, before: int = 0) -> int:
    """Return the CRC-32 of an index, or of a batch of them, behind what had the checksum ``before``.

    Indices that are no numbers or text, nor sequences of such, count by their type.
    """
    try:
        return zlib.crc32(array("q", entry if type(entry) is list else (entry,)), before)  # 64 indices: 2 us
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last
        return zlib.crc32(_text_of(entry).encode(), before)


def _of_unknown(sampler: Any) -> dict[str, JSON]:
    # What has epochs may be longer in one than in another.
    found: dict[str, JSON] = {}
    if not callable(getattr(sampler, "set_epoch", None)):
        found["length"] = length_of(sampler)
    elif isinstance(sampler, DistributedSampler):
        found |= {"length": length_of(sampler)} | _of_distributed(sampler)
    if callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)):
        found["has_state"] = True
    return found


def _of_distributed(sampler: "DistributedSampler[Any]") -> dict[str, JSON]:
    names = ("num_replicas", "shuffle", "seed", "drop_last")
    found: dict[str, JSON] = {name: getattr(sampler, name, None) for name in names}  # a subclass may lack any
    return found | {"dataset_length": length_of(getattr(sampler, "dataset", None))}


def _of_random(sampler: RandomSampler) -> dict[str, JSON]:
    return {"replacement": sampler.replacement, "num_to_draw_from": length_of(sampler.data_source)}


def _of_subset(sampler: SubsetRandomSampler) -> dict[str, JSON]:
    return {"indices": _digest_of(sampler.indices)}


def _of_weighted(sampler: WeightedRandomSampler) -> dict[str, JSON]:
    weights = sampler.weights
    return {
        "replacement": sampler.replacement,
        "num_weights": length_of(weights),
        "weights": _digest_of(weights),
    }


def _of_batches(sampler: BatchSampler) -> dict[str, JSON]:
    inner = fingerprint_of(sampler.sampler)
    return {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last, "sampler": inner}


def _of_list(sampler: Sequence[Any]) -> dict[str, JSON]:
    return {"items": _digest_of(sampler)}


_LOOKS: dict[type, Callable[[Any], dict[str, JSON]]] = {
    BatchSampler: _of_batches,
    DistributedSampler: _of_distributed,
    RandomSampler: _of_random,
    SubsetRandomSampler: _of_subset,
    WeightedRandomSampler: _of_weighted,
    list: _of_list,
    tuple: _of_list,
    range: lambda sampler: {"items": repr(sampler)},
    SequentialSampler: lambda _: {},
}


def _digest_of(values: Any) -> JSON:
    """Return a short hash of a sequence, an array or a tensor; ``None`` of what cannot be looked at in places."""
    try:
        part = values[:: max(1, -(-len(values) // MAX_LOOKED_AT))]
        wide = {"i": np.int64, "u": np.int64, "f": np.float64}.get((numbers := _array_of(part)).dtype.kind)
        return f"{checksum(list(part)):08x}" if wide is None else digest(numbers.astype(wide))
    except Exception:  # a sequence of the user's
        return None


def _array_of(values: Any) -> NDArray[Any]:
    try:
        return column("items", values)
    except ArgumentError:  # batches, say
        return np.empty(0, dtype=object)


def _text_of(entry: Any) -> str:
    if isinstance(entry, torch.Tensor | np.ndarray):
        entry = entry.tolist()
    if isinstance(entry, list | tuple | range):
        return f"[{','.join(map(_text_of, entry))}]"
    if isinstance(entry, np.generic):
        entry = entry.item()
    return repr(entry) if isinstance(entry, str | bytes | int | float | complex | None) else type(entry).__qualname__
