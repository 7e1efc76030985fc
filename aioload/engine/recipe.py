"""Recipe: how the batches of one pass are made."""

from collections.abc import Callable
from typing import Any

from aioload.context import PassContext
from aioload.engine.tolerance import Tolerance
from aioload.layout import Layout
from aioload.ring import Ring


class Recipe:
    """How the batches of one pass are made. ``layout`` is that of the batch seen last, shared by all.

    Args:
        context: What the user's code is told of the pass.
        collate_fn: torch's default or the user's.
        batched: Whether samples are collated (``False``: ``batch_size=None``, one sample is the batch).
        by_rows: Whether samples may be written into rows of a slot.
        on_device: Whether a copier takes the slot over, so that it is sealed and not lent.
        pin: Whether what did not go through a slot is to be copied into page-locked memory.
        ring: Where slots come from.
        locate: Returns the path of a sample, or ``None``.
        on_size: Told the bytes of a batch when they are known.
        tolerance: What is done about samples that fail; ``None``: the batch fails.
        bundles: Whether the tensors of what has no layout are brought together for a device.
    """

    def __init__(
        self,
        *,
        context: PassContext,
        collate_fn: Callable[[Any], Any],
        batched: bool,
        by_rows: bool,
        on_device: bool,
        pin: bool,
        ring: Ring,
        locate: Callable[[Any], Any],
        on_size: Callable[[int], None],
        tolerance: Tolerance | None,
        bundles: bool = True,
    ) -> None:
        self.context = context
        self.collate_fn, self.batched, self.by_rows = collate_fn, batched, by_rows
        self.on_device, self.pin, self.ring = on_device, pin, ring
        self.locate, self.on_size, self.tolerance, self.bundles = locate, on_size, tolerance, bundles
        self.layout: Layout | None = None
