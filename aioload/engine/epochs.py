"""Epochs: the number of each pass, agreed between the loader and its sampler."""

import warnings
from typing import Any

from torch.utils.data import DistributedSampler

from aioload.samplers import Seekable


class Epochs:
    """Counts the passes of one loader; whoever sets an epoch, on the loader or on the sampler, is followed."""

    def __init__(self) -> None:
        self._next = 0
        self._seen: Any = None  # the sampler's own epoch when it was last looked at
        self._warned = self._begun = False

    def __repr__(self) -> str:
        return f"<Epochs, next {self._next}>"

    def next(self, sampler: Any) -> int:
        """Return the epoch that a pass over ``sampler`` would be now."""
        inner = innermost(sampler)
        if isinstance(inner, Seekable):
            return inner.next_epoch
        own = getattr(inner, "epoch", None)
        return own if type(own) is int and own != self._seen else self._next

    def begin(self, sampler: Any, epoch: int) -> None:
        """Note that a pass over ``sampler`` begins."""
        inner = innermost(sampler)
        own = getattr(inner, "epoch", None)
        if isinstance(inner, DistributedSampler) and inner.shuffle and self._begun and own == self._seen:
            self._warn_of_equal_orders(own)
        self._next, self._seen, self._begun = epoch + 1, own, True
        if isinstance(inner, Seekable):
            inner.set_epoch(epoch + 1)  # type: ignore[attr-defined]

    def set(self, epoch: int, *targets: Any) -> None:
        """Make the next pass ``epoch``, and tell each of ``targets`` that has a ``set_epoch``."""
        for target in targets:
            if callable(getattr(target, "set_epoch", None)):
                target.set_epoch(epoch)
        self._next, self._begun = epoch, False
        self._seen = getattr(innermost(targets[0]), "epoch", None)

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


def innermost(sampler: Any) -> Any:
    """Return the sampler that a batch sampler takes its indices from, or ``sampler`` itself."""
    inner = getattr(sampler, "sampler", None)
    return sampler if inner is None or isinstance(sampler, Seekable) else inner
