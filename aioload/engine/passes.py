"""Passes: what an iterator holds, what a loader keeps between iterators, and how either ends when it is let go.

What a finalizer holds lives for ever if it leads back to what it watches. A run does, where the dataset or
``collate_fn`` belongs to an object that keeps the iterator, which is common; a crew and a portal do not. So a finalizer
holds these and has a weak reference to the run.
"""

import os
import time
import weakref

from aioload.engine import aside
from aioload.engine.appearance import Appearance
from aioload.engine.crew import Crew
from aioload.engine.gang import Gang
from aioload.engine.inline import InlineRun
from aioload.engine.portal import Portal
from aioload.engine.run import Run

CLOSE_TIMEOUT_S = 1.0
"""Seconds that closing waits for threads to end. One that is stuck in a read ends when the read does."""

_COLLECTED_TIMEOUT_S = 0.2
"""The same when an iterator was simply dropped, where nobody asked to wait."""


class Pass:
    """A run and the crew it works with, as an iterator holds them.

    Args:
        run: The run.
        crew: The crew or gang it works with, ``None`` for a run without threads.
        owns_crew: Whether the crew ends with the pass.
    """

    def __init__(self, run: Run | InlineRun, crew: Crew | Gang | None, *, owns_crew: bool) -> None:
        self.run, self._crew = run, crew
        self._own_crew = crew if owns_crew else None
        self._finalizer = weakref.finalize(self, _collected, weakref.ref(run), self._own_crew)
        self._finalizer.atexit = False  # the interpreter's end stops all crews, and wakes nobody

    def limits(self) -> tuple[int, int, int]:
        """Return the reads that may be under way at present, the decode threads awake, and the batches ahead."""
        if self._crew is None or self.run.closed or isinstance(self.run, InlineRun):
            return 0, 0, 0
        return self._crew.reads_limit, self._crew.decode_limit, self.run.batches_limit

    @property
    def num_on_device(self) -> int:
        """Batches that are on the device, or on their way, ahead of the consumer."""
        return 0 if isinstance(self.run, InlineRun) else self.run.num_on_device

    @property
    def num_bytes(self) -> int:
        """Bytes in flight in other processes."""
        return self._crew.num_bytes if isinstance(self._crew, Gang) else 0

    def start_on_loop(self) -> None:
        """Start loading from the loop thread: a sampler may think for long before its first index."""
        if isinstance(self.run, InlineRun):
            return
        self.run.check_process()
        if self._crew is None or not self._crew.portal.call(self.run.start_here):
            self.run.start_here()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the pass; threads that are its own are waited for, at most ``timeout_s``. Any thread, any time.

        It also ends, with a shorter wait, when nothing refers to it any more.
        """
        _end(self.run, self._own_crew, timeout_s)
        self._finalizer.detach()  # not before: an interrupt may cut this short

    async def aclose(self) -> None:
        """As :meth:`close`; the running event loop goes on meanwhile."""
        if self._own_crew is None or self.run.closed:
            self.close(0.0)
        else:
            await aside.call(self.close)


def _end(run: Run | InlineRun | None, crew: Crew | Gang | None, timeout_s: float) -> None:
    if crew is not None:
        crew.close()
    if run is not None:
        run.close()
    if crew is not None and timeout_s > 0:
        crew.join(timeout_s)


def _collected(run: "weakref.ref[Run | InlineRun]", crew: Crew | Gang | None) -> None:
    _end(run(), crew, _collected_timeout_s())


def _collected_timeout_s() -> float:
    return 0.0 if aside.in_event_loop() else _COLLECTED_TIMEOUT_S


class Kept:
    """What outlives passes, and is ended with the runtime; it does not lead back to the loader."""

    def __init__(self) -> None:
        self.crew: Crew | Gang | None = None
        self.base_seed: int | None = None  # that of the crew
        self.given: Appearance | None = None  # of what a gang was given
        self.portal: Portal | None = None
        self._pid = os.getpid()

    def close(self, timeout_s: float) -> None:
        """End it. Something new may be kept afterwards."""
        if self._pid != os.getpid():
            if self.portal is not None:
                self.portal.abandon()
            return
        deadline = time.monotonic() + timeout_s
        crew, self.crew, portal, self.portal = self.crew, None, self.portal, None
        if crew is not None:
            crew.close()
            crew.join(timeout_s)
        if portal is not None:
            portal.join(deadline)
            portal.close()

    def collected(self) -> None:
        """End it because the loader is gone."""
        self.close(_collected_timeout_s())
