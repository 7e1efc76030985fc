"""Copier: a finished batch to a device, on a stream of its own.

A batch in a slot takes one copy whatever its structure: the used part of the arena goes over as bytes, and the
leaves are views of it there. The host never waits: the consumer's stream waits for the batch's event, the
slot goes back to the ring once that event has passed, and the device's allocator is told of the consumer's stream.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aioload.device import DeviceBackend, Event, Stream
from aioload.layout import Layout
from aioload.leaf import Column
from aioload.ring import Ring, Slot
from aioload.structure import is_dataclass_instance, with_fields, with_items, with_parts


@dataclass(frozen=True, slots=True)
class Copied:
    """A batch whose copy has been issued.

    Attributes:
        value: The batch on the device.
        event: Passes when it is there.
        pieces: The device memory it takes, of which others are views.
        is_partial: Whether there is something in ``value`` that is left for :meth:`Copier.receive` to move, and so all
            of it for :meth:`Copier.transform_here`.
    """

    value: Any
    event: Event
    pieces: Sequence[torch.Tensor]
    is_partial: bool


class Copier:
    """Moves batches to one device, those that are loaded ahead on a side stream, which is made on first use.

    Args:
        backend: The device.
        ring: Where slots go back to when their copy is done.
        transform: What is done to each batch on the device, ``None`` for nothing.
    """

    def __init__(self, backend: DeviceBackend, ring: Ring, transform: Callable[[Any], Any] | None = None) -> None:
        self._backend, self._ring, self._transform = backend, ring, transform
        self._stream: Stream | None = None

    def copy_slot(self, slot: Slot, layout: Layout, columns: Sequence[Column], num_rows: int) -> Copied:
        """Issue one copy of all that ``slot`` holds. Takes over the slot, also where this raises. Any thread."""
        try:
            stream = self._side_stream()
        except BaseException:
            self._ring.release(slot)
            raise
        try:
            arena = self._backend.copy(slot.tensor(layout.offsets(num_rows)[1]), stream)
        finally:  # what failed may have issued a copy all the same
            event = self._release_behind(slot, stream)

        def view(dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
            return arena[offset : offset + count * dtype.itemsize].view(dtype)

        value = layout.batch(layout.tensors(columns, num_rows, view, self._backend.device))
        return Copied(value, event, (arena,), _moves_itself(value))

    def copy(self, value: Any) -> Copied:
        """Issue the copies of a batch that is in no slot. Some are left for :meth:`receive`. Any thread."""
        stream, pieces = self._side_stream(), list[torch.Tensor]()
        is_partial = False

        def copy_ahead(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal is_partial
            if not _is_one_piece(tensor):
                is_partial = True
                return tensor
            pieces.append(self._backend.copy(tensor, stream))
            return pieces[-1]

        moved = map_tensors(value, copy_ahead)
        event = self._backend.record_event(stream)
        return Copied(moved, event, pieces, is_partial or _moves_itself(moved))

    def transform(self, copied: Copied) -> Copied:
        """Return the batch transformed, on the side stream, unless some of it is to be moved later. Any thread.

        Raises:
            TypeError: The transform returned something whose memory cannot be told from others' use of it.
        """
        if self._transform is None or copied.is_partial:
            return copied
        stream = self._side_stream()
        with self._backend.stream(stream):
            value = self._transform(copied.value)
        return Copied(
            value, self._backend.record_event(stream), _pieces_of(value, self._backend.device), is_partial=False
        )

    def receive(self, copied: Copied) -> Any:
        """Return the batch; the consumer's current stream waits for it, and the allocator remembers that stream.

        In the consumer's thread. What is no single piece of memory (sparse tensors, objects that move themselves) is
        moved here: what it would take on the side stream could not be marked, and so might be used again too early.
        """
        backend = self._backend
        current = backend.current_stream()
        backend.wait_event(current, copied.event)
        for piece in copied.pieces:
            backend.record_stream(piece, current)
        if not copied.is_partial:
            return copied.value

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if _is_one_piece(tensor) else tensor.to(backend.device)

        return map_tensors(copied.value, move, self._move_itself)

    def move(self, value: Any) -> Any:
        """Return ``value`` with its tensors on the device, copied on the caller's current stream."""

        def copy_now(tensor: torch.Tensor) -> torch.Tensor:
            return self._backend.copy(tensor) if _is_one_piece(tensor) else tensor.to(self._backend.device)

        return map_tensors(value, copy_now, self._move_itself)

    def transform_here(self, value: Any) -> Any:
        """Return a batch that is on the device transformed, on the caller's current stream."""
        return value if self._transform is None else self._transform(value)

    def _move_itself(self, value: Any) -> Any:
        return value.to(self._backend.device)

    def _side_stream(self) -> Stream:
        if self._stream is None:
            self._stream = self._backend.new_stream()
        return self._stream

    def _release_behind(self, slot: Slot, stream: Stream) -> Event:
        try:
            event = self._backend.record_event(stream)
        except BaseException:
            self._ring.drop(slot)  # nobody can tell when a copy from it is done
            raise
        self._ring.release_behind(slot, event)
        return event


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], own: Callable[[Any], Any] | None = None
) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it; other leaves stay as they are.

    Args:
        value: Containers of any kind and depth. Those without a tensor are returned as they are, not copied.
        function: Maps a tensor.
        own: Maps an object that is no tensor but has a method ``to``, which is not looked into.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if callable(getattr(value, "to", None)):
        return value if own is None else own(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function, own) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else _with_items(value, items)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        parts = [map_tensors(item, function, own) for item in value]
        unchanged = all(part is item for part, item in zip(parts, value, strict=True))
        return value if unchanged else with_parts(value, parts)
    if is_dataclass_instance(value):
        before = [getattr(value, field.name) for field in dataclasses.fields(value)]
        after = [map_tensors(item, function, own) for item in before]
        unchanged = all(one is other for one, other in zip(before, after, strict=True))
        return value if unchanged else with_fields(value, after)
    return value


def _with_items(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(original, Counter):
        return with_items(original, items)
    clone = copy.copy(original)
    dict.update(clone, items)  # its own would add them to what is there
    return clone


def _is_one_piece(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _moves_itself(value: Any) -> bool:
    """Whether there is an object in ``value`` that is to hear of the device itself."""
    found = []

    def note(own: Any) -> Any:
        found.append(own)
        return own

    map_tensors(value, lambda tensor: tensor, note)
    return bool(found)


def _pieces_of(value: Any, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors on the device in what a transform has returned."""
    pieces: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_one_piece(tensor):
            refuse(tensor)
        if tensor.device == device:
            pieces.append(tensor)
        return tensor

    def refuse(other: Any) -> Any:
        what = f"a {other.layout} tensor" if isinstance(other, torch.Tensor) else f"a {type(other).__name__}"
        message = (
            f"device_transform must return dense tensors, in containers of any kind; got {what}, whose memory the "
            "allocator cannot be told about. Make it of them in the loop."
        )
        raise TypeError(message)

    map_tensors(value, note, refuse)
    return pieces
