"""Copier: a finished batch to a device, on a stream of its own.

A batch in a slot takes one copy whatever its structure: the used part of the arena goes over as bytes, and the
leaves, or the tensors that were brought together in it, are views of it there. The host never waits: the consumer's
stream waits for the batch's event, the slot goes back to the ring once that event has passed, and the device's
allocator is told of the consumer's stream.
For a device without streams there is nothing to be done ahead: :meth:`Copier.receive` moves the batch.
"""

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from aioload.bundle import Bundle, bundle
from aioload.device import PASSED, DeviceBackend, Event, Stream
from aioload.layout import Layout
from aioload.leaf import Column
from aioload.ring import Ring
from aioload.slot import Slot
from aioload.structure import map_tensors

MOST_BEHIND = 4
"""Batches by which the device may be behind the consumer."""

_MOST_LOOKED_AT = 1000
"""Objects that are looked at to find tensors where they are not expected."""

_NOT_LOOKED_INTO = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


class _Carry(Protocol):
    """Takes a batch over: see :func:`~aioload.structure.map_tensors`."""

    def __call__(
        self, function: Callable[[torch.Tensor], torch.Tensor], own: Callable[[Any], Any] | None = None, /
    ) -> Any: ...


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
        self.ring, self._backend, self._transform = ring, backend, transform
        self._stream: Stream | None = None
        self._moving: deque[Event] = deque()  # behind copies on consumers' streams

    def copy_slot(self, slot: Slot, layout: Layout, columns: Sequence[Column], num_rows: int) -> Copied:
        """Issue one copy of all that ``slot`` holds. Takes over the slot, also where this raises. Any thread."""
        stream = self._side_stream_for(slot)
        if stream is None:
            return _left(layout.batch(layout.tensors(columns, num_rows, self.ring.lend(slot))))
        arena, event = self._copy_arena(slot, layout.offsets(num_rows)[1], stream)

        def view(dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
            return arena[offset : offset + count * dtype.itemsize].view(dtype)

        value = layout.batch(layout.tensors(columns, num_rows, view, self._backend.device))
        return Copied(value, event, (arena,), _moves_itself(value))

    def copy(self, value: Any) -> Copied:
        """Issue the copies of a batch that is in no slot. Some are left for :meth:`receive`. Any thread."""
        stream = self._side_stream()
        return _left(value) if stream is None else self._copy_ahead(functools.partial(map_tensors, value), stream)

    def copy_bundle(self, slot: Slot, bundle: Bundle) -> Copied:
        """Issue one copy of all that is in ``slot``, and as for :meth:`copy` of the rest. Takes over the slot."""
        stream = self._side_stream_for(slot)
        if stream is None:
            return _left(bundle.moved(self.ring.lend(slot)(torch.uint8, bundle.num_bytes, 0), lambda tensor: tensor))
        arena, event = self._copy_arena(slot, bundle.num_bytes, stream)
        copied = self._copy_ahead(functools.partial(bundle.moved, arena), stream, event)
        return replace(copied, pieces=[arena, *copied.pieces])

    def _copy_ahead(self, carry: _Carry, stream: Stream, event: Event | None = None) -> Copied:
        pieces, is_partial, has_waited = list[torch.Tensor](), False, False

        def copy_ahead(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal is_partial, has_waited
            if not _is_one_piece(tensor):
                is_partial = True
                return tensor
            pieces.append(self._backend.copy(tensor, stream))
            if pieces[-1] is tensor:  # it is there already, made on the stream that is current where none was chosen
                if not has_waited:
                    self._backend.wait_event(stream, self.mark())
                    has_waited = True
                self._backend.record_stream(tensor, stream)
            return pieces[-1]

        moved = carry(copy_ahead)
        if pieces or event is None:
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
        if copied.event is PASSED:
            return self.move(copied.value)
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
        """Return ``value`` with its tensors on the device, copied on the caller's current stream, mostly in one."""
        carry: _Carry = functools.partial(map_tensors, value)
        stream = self._backend.current_stream()
        if stream is not None and (found := bundle(value, self.ring)) is not None:
            bundled, slot = found
            arena, event = self._copy_arena(slot, bundled.num_bytes, stream)
            self._keep_up(event)
            carry = functools.partial(bundled.moved, arena)

        def copy_now(tensor: torch.Tensor) -> torch.Tensor:
            return self._backend.copy(tensor) if _is_one_piece(tensor) else tensor.to(self._backend.device)

        return carry(copy_now, self._move_itself)

    def transform_here(self, value: Any) -> Any:
        """Return a batch that is on the device transformed, on the caller's current stream."""
        return value if self._transform is None else self._transform(value)

    def mark(self) -> Event:
        """Return an event behind all that is on the caller's current stream."""
        stream = self._backend.current_stream()
        return PASSED if stream is None else self._backend.record_event(stream)

    def _keep_up(self, event: Event) -> None:
        """Wait while the caller's copies are so far behind that slots would become ever more."""
        self._moving.append(event)
        while len(self._moving) > MOST_BEHIND:
            try:
                oldest = self._moving.popleft()
            except IndexError:  # another consumer was faster
                return
            oldest.synchronize()

    def _move_itself(self, value: Any) -> Any:
        return value.to(self._backend.device)

    def _side_stream(self) -> Stream | None:
        if self._stream is None:
            self._stream = self._backend.new_stream()
        return self._stream

    def _side_stream_for(self, slot: Slot) -> Stream | None:
        """Return the side stream; where it cannot be made, ``slot`` is given back."""
        try:
            return self._side_stream()
        except BaseException:
            self.ring.release(slot)
            raise

    def _copy_arena(self, slot: Slot, num_bytes: int, stream: Stream) -> tuple[torch.Tensor, Event]:
        """Issue the copy of what is in ``slot``. Takes it over, also where this raises."""
        try:
            arena = self._backend.copy(slot.tensor(num_bytes), stream)
        finally:  # what failed may have issued a copy all the same
            event = self._release_behind(slot, stream)
        return arena, event

    def _release_behind(self, slot: Slot, stream: Stream) -> Event:
        try:
            event = self._backend.record_event(stream)
        except BaseException:
            self.ring.drop(slot)  # nobody can tell when a copy from it is done
            raise
        self.ring.release_behind(slot, event)
        return event


def _left(value: Any) -> Copied:
    """Return a batch of which all is left for :meth:`Copier.receive` to move."""
    return Copied(value, PASSED, (), is_partial=True)


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
            f"device_transform must return dense tensors, in lists, tuples, dicts, dataclasses and the like; got "
            f"{what}, whose memory the allocator cannot be told about. Make it of them in the loop."
        )
        raise TypeError(message)

    map_tensors(value, note, refuse, lambda other: refuse(other) if _hides_tensors(other, device) else other)
    return pieces


def _hides_tensors(value: Any, device: torch.device) -> bool:
    """Whether an object into which nobody looks (a set, an iterator, an own class) refers to tensors there."""
    seen, ahead = set[int](), [value]
    while ahead and len(seen) < _MOST_LOOKED_AT:
        each = ahead.pop()
        if isinstance(each, torch.Tensor) and each.device == device:
            return True
        if id(each) in seen or isinstance(each, _NOT_LOOKED_INTO) or not gc.is_tracked(each):
            continue
        seen.add(id(each))
        ahead.extend(gc.get_referents(each))
    return False
