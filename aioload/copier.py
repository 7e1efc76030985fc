"""Copier: a finished batch to a device, on a stream of its own. The only file that knows CUDA.

A batch in a slot takes one copy whatever its structure: the used part of the arena goes over as bytes, and the
leaves are views of it there. The host never waits: the consumer's stream waits for the batch's event, the
slot goes back to the ring once that event has passed, and the device allocator is told of the consumer's stream.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aioload.errors import ArgumentError
from aioload.layout import Column, Layout, build_dataclass
from aioload.ring import Ring, Slot


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

    def receive(self, copied: Copied) -> None:
        """Make the consumer's current stream wait for the copy. In the consumer's thread."""
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
        """Issue the copies of a batch that is in no slot."""
        stream = self._side_stream()
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            moved = self.move(value)
            return Copied(moved, stream.record_event())

    def receive(self, copied: Copied) -> None:
        """Make the consumer's current stream wait for the copy, and the allocator remember that stream."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied.event)
        map_tensors(copied.value, lambda tensor: _mark_used(tensor, current))

    def move(self, value: Any) -> Any:
        """Return ``value`` with its tensors on the device, copied on the caller's current stream."""
        return map_tensors(value, lambda tensor: tensor.to(self._device, non_blocking=True))

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


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it; other leaves stay as they are."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else _refilled(value, mapped)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(item, function) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(item, function) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        values = [map_tensors(getattr(value, name), function) for name in names]
        return build_dataclass(type(value), names, values)
    if callable(getattr(value, "to", None)):  # a batch of the user's own type that can move itself
        return function(value)
    return value


def _refilled(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    clone = copy.copy(original)
    clone.update(items)
    return clone


def _mark_used(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
