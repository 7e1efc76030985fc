"""Randomness: numbers that depend on the seed, the epoch and the sample, and on nothing else."""

import operator
import threading
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch

from aioload.context import HERE, PassContext, Stage
from aioload.errors import NoSampleError

_MASK = (1 << 64) - 1
_HASHED = 1 << 8
_WORKER = 1 << 16


def sample_rng(index: Any = None) -> np.random.Generator:
    """Return the random numbers of the sample that the calling code loads.

    To be called in ``__getitem__``, ``decode``, ``location``, the iterator of an iterable dataset, or what they call,
    such as transforms. Sample ``i`` of epoch ``e`` gets the same numbers whatever thread loads it, with however many
    workers, after a resume and on any rank: they depend on ``(seed, epoch, index)`` alone, where ``seed`` is the
    loader's, or, without one, drawn from torch's generators once per pass (per life of persistent workers). Calls for
    the same sample return the same generator, which goes on where the call before left it. ``location`` has one of its
    own. For torch: ``torch.Generator().manual_seed(int(sample_rng().integers(2**63)))``.

    The generator is the calling sample's alone; do not share it with other threads.

    Args:
        index: The sample's index as the sampler gave it, for code that loads many samples at once
            (``__getitems__``). Each such call begins the sample's numbers anew.

    Raises:
        NoSampleError: The calling code works for no single sample (``__getitems__``, ``collate_fn``) and gave no
            ``index``; or it runs in a thread that the loader knows nothing of. In the main thread, outside a loader or
            in another one, numbers are drawn by torch's global generator instead: to try a dataset out.
    """
    current = HERE.get()
    if current is None:
        return _outside(index)
    of, of_sample, stage, worker, generator = current
    if index is not None:
        return _generator(of, index, Stage.SAMPLE if stage is Stage.BATCH else stage, worker)
    if stage is Stage.BATCH:
        message = (
            "sample_rng() was called by code that works for a whole batch, such as __getitems__ or collate_fn. "
            "Say which sample is meant: sample_rng(index)."
        )
        raise NoSampleError(message)
    if generator is None:
        generator = current[4] = _generator(of, of_sample, stage, worker)
    return cast("np.random.Generator", generator)


def _generator(of: PassContext, index: Any, stage: Stage, worker: int | None) -> np.random.Generator:
    """Return a generator that no other sample shares: (seed, epoch) is the key of a counter-based one.

    The lower half of the 256 bit counter counts the draws, the upper half is the sample. Philox is described in
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    kind, number = _as_number(index)
    kind |= stage
    if stage in (Stage.ITEM, Stage.BEGIN):
        kind |= _WORKER * (worker or 0)
    key = [(of.base_seed if of.seed is None else of.seed) & _MASK, of.epoch & _MASK]
    counter = np.array([0, 0, kind, number], np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64), counter=counter))


def _as_number(index: Any) -> tuple[int, int]:
    """Return a kind and a number below 2**64, for an index of any usual type."""
    try:
        number = operator.index(index)
    except TypeError:
        text = _text_of(index)
    else:
        if -(1 << 63) <= number < 1 << 63:
            return 0, number & _MASK
        text = str(number)
    return _HASHED, int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _text_of(index: Any) -> str:
    if isinstance(index, str):
        return repr(str.__str__(index))  # numpy's strings have a repr of their own
    if isinstance(index, bytes):
        return repr(bytes(index))
    if isinstance(index, tuple | list):
        return f"({', '.join(map(_text_of, index))})"
    try:
        return str(operator.index(index))
    except TypeError:
        message = (
            "The numbers of a sample follow from its index, which needs to be a whole number, a string, bytes or a "
            f"tuple of these; got {index!r}. Call sample_rng(number) with a number of your own for it."
        )
        raise NoSampleError(message) from None


def _outside(index: Any) -> np.random.Generator:
    if threading.current_thread() is not threading.main_thread():
        message = (
            "sample_rng() was called in a thread that no loader has started, so the sample is not known. Call it in "
            "the dataset's own method and pass the generator on."
        )
        raise NoSampleError(message)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    return np.random.default_rng(seed if index is None else [seed, *_as_number(index)])
