"""Ring: the slots that batches are written into and handed out from, reused when nobody can see them.

A slot is one flat, aligned byte arena. Its states::

      acquire            seal              lend              last view collected
 FREE --------> FILLING ------> READY ----------> LENT ------------------------> FREE
                   |              |  release_behind           the event has passed
                   |              +-------------> COPYING ---------------------> FREE
                   +--------------+--- release (failed, cancelled) ------------> FREE

Whoever acquired a slot owns it until it is lent or released. Lending hands the memory to the consumer: the ring
learns from the garbage collector when the last tensor, array or export over it is gone, and writes to it no
sooner. Of a slot that a device still reads, it has an event, and looks whether that has passed when it needs a slot.
When every slot is in use the ring grows; it never waits.
"""

import functools
import threading
import warnings
import weakref
from collections import deque

from aioload.outliving import Passing, drop, outlive, sweep
from aioload.pinned import Living, PageLock
from aioload.slot import Foreign, Lent, NewMemory, Slot, SlotState, View, Watch, view_of_array, view_of_tensor

_MIN_SLOT_BYTES = 4096

_TIMES_TOO_LARGE, _SMALL_BYTES = 4, 1 << 20
"""A slot that is so many times larger than wanted is kept for others, unless it is as small as this."""


class Ring:
    """A growing set of slots. Any thread may call any method.

    Args:
        new_memory: Gives slots their memory, page-locked, which device copies need to run beside the host; ``None``
            for any. If it raises, any will do, and one warning says so ...
        falls_back: ... unless this is ``False``: then it is raised.
        page_lock: Page-locks memory that was adopted. If it raises, that stays as it is, and the warning says so.
        reuse: Whether a slot that was lent comes back. Without it every batch has memory of its own from torch's
            allocator, and gives it back there: that alone knows of the copies that the consumer has issued from it, on
            whatever streams, and gives it out again when they are done.
        max_free: Slots kept when free; more are given back to the allocator.
        warn_held: Lent slots at which one warning says that batches are being held ...
        warn_held_bytes: ... if they are as many bytes as this.
        poison: A byte that every slot is filled with when it becomes free, so that a test sees a stale view.
    """

    def __init__(
        self,
        *,
        new_memory: NewMemory | None = None,
        falls_back: bool = True,
        page_lock: PageLock | None = None,
        reuse: bool = True,
        max_free: int = 8,
        warn_held: int = 64,
        warn_held_bytes: int = 64 << 20,
        poison: int | None = None,
    ) -> None:
        self.new_memory, self.reuse, self._falls_back = new_memory, reuse, falls_back
        self._page_lock = page_lock
        self.max_free, self.poison = max_free, poison
        self.warn_held, self.warn_held_bytes = warn_held, warn_held_bytes
        self.max_held_seen = 0
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer that releases slots.
        self._lock = threading.RLock()
        self._free: list[Slot] = []
        self._free_bytes = 0
        self._lent: dict[Slot, None] = {}
        self._lent_bytes = 0
        self._given = Living()  # memory of slots that were lent and do not come back
        # Slots whose last view is gone. A collector may report one while this very thread holds the lock, so
        # reports are only appended here (which needs no lock) and taken in at the next acquire.
        self._returned: deque[Watch] = deque()
        self._copying: deque[tuple[Slot, Passing]] = deque()  # in the order of their events
        self._warned = self._warned_of_refusal = False
        self._refusal: str | None = None  # why there was no page-locked memory for a slot
        if page_lock is not None:
            sweep()
            weakref.finalize(self, outlive, self._copying).atexit = False

    def __repr__(self) -> str:
        return f"<Ring free={len(self._free)} lent={self.num_lent} copying={self.num_copying}>"

    @property
    def num_lent(self) -> int:
        """Slots that the consumer can still see."""
        num_lent = len(self._lent) - len(self._returned)
        return num_lent if self.reuse else num_lent + self._given.count()[0]

    @property
    def num_copying(self) -> int:
        """Slots that a device was still reading when the ring last looked."""
        return len(self._copying)

    def acquire(self, num_bytes: int) -> Slot:
        """Return a slot of at least ``num_bytes``, FREE -> FILLING; the caller owns it. Never waits.

        Raises:
            Exception: There is no memory for it.
        """
        with self._lock:
            self._take_in()
            most = max(_SMALL_BYTES, _TIMES_TOO_LARGE * num_bytes)
            fitting = [slot for slot in self._free if num_bytes <= slot.arena.nbytes <= most]
            if fitting:
                # The smallest, and of those the one freed last: its bytes may still be in the processor's cache.
                slot = min(reversed(fitting), key=lambda slot: (not slot.is_pinned, slot.arena.nbytes))
                self._take(slot)
                slot.state = SlotState.FILLING
                return slot
        slot = self._new_slot(max(_MIN_SLOT_BYTES, num_bytes))
        slot.state = SlotState.FILLING
        return slot

    @property
    def locks_pages(self) -> bool:
        """Whether memory that is adopted can be page-locked."""
        return self._page_lock is not None

    def adopt(self, foreign: Foreign) -> Slot:
        """Return a slot over memory that is filled elsewhere (FREE; see :meth:`Slot.arrive`), for all but acquiring."""
        slot = Slot(len(foreign.memory), lambda _: foreign.memory)
        slot.foreign = foreign
        return slot

    def page_lock(self, slot: Slot) -> None:
        """Have the memory of an adopted slot page-locked until it is gone, if the ring does that; tried once for each.

        That is for slots that a copier takes. Who has nothing but torch to tell him when copies are done, as a consumer
        does, must not copy from it: torch's allocator does not know it. So :meth:`lend` lends copies.
        """
        if self._page_lock is None or slot.is_locked is not None:
            return
        assert slot.foreign is not None, slot
        try:
            slot.foreign.before_unmapping(self._page_lock(slot.foreign.memory))
            slot.is_locked = True
        except Exception as exc:  # torch has several for this
            slot.is_locked, self._refusal = False, repr(exc)

    def take_in(self) -> None:
        """Find the slots that nobody sees any more, without acquiring one."""
        if self._returned or self._copying:
            with self._lock:
                self._take_in()

    def release(self, slot: Slot) -> None:
        """FILLING or READY -> FREE: the caller gives the slot back and must not touch it again."""
        assert slot.state in (SlotState.FILLING, SlotState.READY), slot
        with self._lock:
            self._put_back(slot)

    def release_behind(self, slot: Slot, event: Passing) -> None:
        """READY -> COPYING: as :meth:`release`, when ``event`` has passed; no sooner than the event given before it."""
        assert slot.state is SlotState.READY, slot
        slot.state = SlotState.COPYING
        with self._lock:
            self._copying.append((slot, event))

    def drop(self, slot: Slot) -> None:
        """READY -> DROPPED: let the slot's memory go to where it came from; something may still be reading it."""
        assert slot.state is SlotState.READY, slot
        drop(slot)

    def lend(self, slot: Slot) -> View:
        """READY -> LENT: return a function that gives out tensors over the arena, for the consumer.

        The slot comes back by itself when that function, and all the tensors it gave, have been collected. (Of one that
        was page-locked where it was, a copy is lent, and it is free at once; see :meth:`page_lock`.) Where an interrupt
        cuts this short the slot is READY still: none comes between the last lines, where nothing is called.
        """
        assert slot.state is SlotState.READY, slot
        if slot.is_locked:
            private = Slot(slot.arena.nbytes, None)
            private.arena[:] = slot.arena
            self.release(slot)
            return functools.partial(view_of_array, private.arena)
        if not self.reuse and slot.home is None:
            slot.state = SlotState.DROPPED
            memory = slot.tensor(slot.arena.nbytes)
            self._given.add(memory)
            return functools.partial(view_of_tensor, memory)
        lent = slot.arena.view(Lent)
        view = functools.partial(view_of_array, lent)
        with self._lock:
            if slot not in self._lent:
                self._lent[slot] = None
                self._lent_bytes += slot.arena.nbytes
        watch = Watch(lent, self._returned.append)
        slot.watch, watch.slot = watch, slot
        slot.state = SlotState.LENT
        return view

    def trim(self, max_bytes: int) -> None:
        """Keep no more than ``max_bytes`` of memory that nobody uses."""
        if self._free_bytes <= max_bytes and not self._returned and not self._copying:
            return
        with self._lock:
            self._take_in()
            while self._free_bytes > max_bytes:
                self._drop_smallest()

    def warn_if_not_pinned(self, stacklevel: int = 5) -> None:
        """Warn, once, when slots have memory that is not page-locked although it should be.

        Args:
            stacklevel: From here to the line of the loop.
        """
        if self._refusal is None or self._warned_of_refusal:
            return
        self._warned_of_refusal = True
        warnings.warn(
            f"There was no page-locked memory for a batch, so that its copy to a device holds up the host: "
            f"{self._refusal}. Smaller batches, or fewer ahead (prefetch_factor, prefetch_bytes), need less.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )

    def warn_if_held(self) -> None:
        """Warn, once, when the consumer holds so many batches that memory grows with them."""
        if self._warned:
            return
        num_lent = self.num_lent
        self.max_held_seen = max(self.max_held_seen, num_lent)
        if num_lent < self.warn_held:
            return
        with self._lock:
            self._take_in()
            num_given, given_bytes = self._given.count()
            num_held, held_bytes = len(self._lent) + num_given, self._lent_bytes + given_bytes
        if num_held < self.warn_held or held_bytes < self.warn_held_bytes:
            return
        self._warned = True
        warnings.warn(
            f"{num_held} batches ({held_bytes / 1e6:.0f} MB) are still referenced, so each new batch needs "
            "new memory. If that is not meant, drop batches after use, or keep copies of the parts you need.",
            RuntimeWarning,
            stacklevel=5,  # the line of the loop
        )

    def _new_slot(self, num_bytes: int) -> Slot:
        try:
            return Slot(num_bytes, self.new_memory)
        except Exception as exc:  # torch has several for this
            if self.new_memory is None or not self._falls_back:
                raise
            self._refusal = repr(exc)
        return Slot(num_bytes, None)

    def _take_in(self) -> None:
        self._take_in_copied()
        while self._returned:
            watch = self._returned[0]
            if watch.slot.watch is watch:  # else an interrupt came right here
                self._put_back(watch.slot)
            if self._returned and self._returned[0] is watch:  # else a finalizer has been here
                self._returned.popleft()

    def _take_in_copied(self) -> None:
        while self._copying:
            slot, event = entry = self._copying[0]
            try:
                if not event.query():
                    return
            except Exception:  # the device is broken: the next copy will say so, and nobody that this one is done
                drop(slot)
            if slot.state is SlotState.COPYING:
                self._put_back(slot)
            if self._copying and self._copying[0] is entry:
                self._copying.popleft()

    def _put_back(self, slot: Slot) -> None:
        if self.poison is not None:
            slot.arena.fill(self.poison)
        # An interrupt comes before this, and all is as it was, or after: nothing is called in between but what is no
        # function of Python, at the end.
        if slot in self._lent:
            del self._lent[slot]
            self._lent_bytes -= slot.arena.nbytes
        slot.watch, slot.state = None, SlotState.FREE
        if slot.home is not None:
            slot.home()
            return
        self._free += [slot]
        self._free_bytes += slot.arena.nbytes
        if len(self._free) > self.max_free:
            self._drop_smallest()

    def _drop_smallest(self) -> None:
        """Let a free slot go: batches that have grown must not leave the ring full of small ones."""
        smallest = min(self._free, key=lambda slot: (slot.is_pinned, slot.arena.nbytes))
        self._take(smallest)
        smallest.state = SlotState.DROPPED

    def _take(self, slot: Slot) -> None:
        del self._free[self._free.index(slot)]  # not by remove(), behind which an interrupt could come
        self._free_bytes -= slot.arena.nbytes
