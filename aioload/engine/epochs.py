"""Epochs: the number of each pass, agreed between the loader and its sampler."""

import warnings
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from aioload.samplers import Seekable

_MOST_LINKS = 16  # an object may answer to any name


class Epochs:
    """Counts the passes of one loader; whoever sets an epoch, on the loader or on the sampler, is followed."""

    def __init__(self) -> None:
        self._next = 0
        self._seen: int | None = None  # the sampler's own epoch when it was last looked at
        self._warned = self._begun = False

    def __repr__(self) -> str:
        return f"<Epochs, next {self._next}>"

    def next(self, sampler: Any) -> int:
        """Return the epoch that a pass over ``sampler`` would be now."""
        own = epoch_of(sampler)
        if own is None or (own == self._seen and not isinstance(innermost(sampler), Seekable)):
            return self._next
        return own

    def begin(self, sampler: Any, epoch: int, *, again: bool = False) -> None:
        """Note that a pass over ``sampler`` begins, or goes on ``again``."""
        inner, own = innermost(sampler), epoch_of(sampler)
        if isinstance(inner, DistributedSampler) and inner.shuffle and self._begun and own == self._seen and not again:
            self._warn_of_equal_orders(own)
        self._next, self._seen, self._begun = epoch + 1, own, True
        seekable = seekable_in(sampler)
        if seekable is not None:  # which the pass does not move; any other moves when it is iterated over
            seekable.set_epoch(epoch + 1)

    def set(self, epoch: int, *targets: Any) -> None:
        """Make the next pass ``epoch``, and tell each of ``targets`` that has a ``set_epoch``."""
        for target in targets:
            if callable(getattr(target, "set_epoch", None)):
                target.set_epoch(epoch)
        self._next, self._begun = epoch, False
        self._seen = epoch_of(targets[0])

    def _warn_of_equal_orders(self, epoch: Any) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"This pass has the same order as the one before: the DistributedSampler is still at epoch {epoch!r}. "
            "Call loader.set_epoch(epoch) before each pass.",
            UserWarning,
            stacklevel=6,  # the line of the loop
        )


def seekable_in(sampler: Any) -> Any:
    """Return the sampler that passes begin at an epoch and a position of, without moving it; ``None`` if it has none.

    That is ``sampler`` itself, or the one under torch's own batch sampler: what others do with theirs is not known.
    """
    inner = batched_by_torch(sampler)
    return inner if isinstance(inner, Seekable) else None


def batched_by_torch(sampler: Any) -> Any:
    """Return the sampler whose indices torch's own batch sampler puts together, or ``sampler`` itself."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def links_of(sampler: Any) -> list[Any]:
    """Return the sampler, the one that it takes its indices from, and so on."""
    links = [sampler]
    while (inner := getattr(links[-1], "sampler", None)) is not None and len(links) < _MOST_LINKS:
        links.append(inner)
    return links


def epoch_of(sampler: Any) -> int | None:
    """Return the epoch that the sampler is set to, if it has one."""
    inner = innermost(sampler)
    epoch = getattr(inner, "next_epoch" if isinstance(inner, Seekable) else "epoch", None)
    return epoch if type(epoch) is int else None


def innermost(sampler: Any) -> Any:
    """Return the sampler that a batch sampler takes its indices from, or ``sampler`` itself."""
    inner = getattr(sampler, "sampler", None)
    return sampler if inner is None or isinstance(sampler, Seekable) else inner
