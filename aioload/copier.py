"""Copier: a finished batch to a device, on a stream of its own. The only file that knows CUDA.

A batch in a slot takes one copy whatever its structure: the used part of the arena goes over as bytes, and the
leaves are views of it there. The host never waits: the consumer's stream waits for the batch's event, the
slot goes back to the ring once that event has passed, and the device allocator is told of the consumer's stream.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aioload.errors import ArgumentError
from aioload.layout import Layout
from aioload.leaf import Column
from aioload.ring import Ring, Slot
from aioload.structure import is_dataclass_instance, with_fields, with_items, with_parts


@dataclass(frozen=True, slots=True)
class Copied:
    """A batch whose copy has been issued: its value on the device, and the event of the copy."""

    value: Any
    event: Any


class Copier(Protocol):
    """Moves batches to a device."""

    def copy_slot(self, slot: Slot, layout: Layout, columns: Sequence[Column], num_rows: int) -> Copied:
        """Issue one copy of all that ``slot`` holds. Takes over the slot. On the loop thread only."""
        ...

    def copy(self, value: Any) -> Copied:
        """Issue the copies of a batch that is in no slot. On the loop thread only."""
        ...

    def receive(self, copied: Copied) -> Any:
        """Return the batch and make the consumer's current stream wait for its copy. In the consumer's thread."""
        ...

    def move(self, value: Any) -> Any:
        """Return ``value`` with its tensors on the device, copied on the caller's current stream."""
        ...


class CudaCopier:
    """Copies to one CUDA device on a side stream, which is made on first use.

    Args:
        device: A CUDA device.
        ring: Where slots go back to when their copy is done.
    """

    def __init__(self, device: torch.device, ring: Ring) -> None:
        self._device, self._ring = device, ring
        self._stream: torch.Stream | None = None
        self._in_flight: deque[tuple[Any, Slot]] = deque()

    def copy_slot(self, slot: Slot, layout: Layout, columns: Sequence[Column], num_rows: int) -> Copied:
        """Issue one copy of all that ``slot`` holds."""
        self._reclaim()
        host = slot.tensor(layout.offsets(num_rows)[1])
        stream = self._side_stream()
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # torch's stubs know only torch.cuda.Stream
            arena = host.to(self._device, non_blocking=True)
            event = stream.record_event()

        def view(dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
            return arena[offset : offset + count * dtype.itemsize].view(dtype)

        self._in_flight.append((event, slot))
        tensors = layout.tensors(columns, num_rows, view, self._device)
        return Copied(layout.batch(tensors), event)

    def copy(self, value: Any) -> Copied:
        """Issue the copies of a batch that is in no slot. Some are left for :meth:`receive`."""
        stream = self._side_stream()
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            moved = map_tensors(value, self._to_device)
            return Copied(moved, stream.record_event())

    def receive(self, copied: Copied) -> Any:
        """Return the batch; the consumer's current stream waits for it, and the allocator remembers that stream.

        What is no single piece of memory (sparse tensors, objects that move themselves) is moved here: what it
        would take on the side stream could not be marked, and so might be used again too early.
        """
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied.event)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_one_piece(tensor):
                return tensor.to(self._device)
            tensor.record_stream(current)
            return tensor

        return map_tensors(copied.value, take, self._move_itself)

    def move(self, value: Any) -> Any:
        """Return ``value`` with its tensors on the device, copied on the caller's current stream."""
        return map_tensors(value, lambda tensor: tensor.to(self._device, non_blocking=True), self._move_itself)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True) if _is_one_piece(tensor) else tensor

    def _move_itself(self, value: Any) -> Any:
        return value.to(self._device)

    def _side_stream(self) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        return self._stream

    def _reclaim(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():
            self._ring.release(self._in_flight.popleft()[1])


def resolve_device(device: Any) -> torch.device:
    """Return the device that batches are to arrive on.

    Raises:
        ArgumentError: It is no device, or one that this machine does not have.
        NotImplementedError: A kind of device that is not supported.
    """
    try:
        resolved = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as exc:
        message = f"device needs 'cpu', 'cuda', 'cuda:N' or a torch.device; got {device!r}."
        raise ArgumentError(message) from exc
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        message = f"device={device!r}: only cpu and cuda devices are supported so far."
        raise NotImplementedError(message)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (resolved.index or 0) >= count:
        message = (
            f"device={device!r} needs a CUDA device of that number, but torch {torch.__version__} sees {count}. "
            "Use device='cpu', or a torch build and driver that see the GPU."
        )
        raise ArgumentError(message)
    return resolved if resolved.index is not None else torch.device("cuda", torch.cuda.current_device())


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
        return value if all(items[key] is item for key, item in value.items()) else with_items(value, items)
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


def _is_one_piece(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
