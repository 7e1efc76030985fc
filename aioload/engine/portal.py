"""Portal: the loader's own event loop, in its own thread, and the one way in.

The loop lives in a thread so that a loader works in a script, in a notebook, under any other event loop and
inside one that is running, and so that neither holds up the other. Its selector is ``poll``, which has no state
in the kernel: a forked child that closes its copy does not disturb the parent's, as it would with ``epoll``.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any


class Portal:
    """An event loop in a daemon thread ``aioload-loop``, while anyone uses it.

    Args:
        keep_loop: Whether the loop object outlives its thread, so that what an async dataset bound to it
            (sessions, connections) still works in the next epoch.
    """

    def __init__(self, *, keep_loop: bool) -> None:
        self._keep_loop = keep_loop
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer that calls release().
        self._lock = threading.RLock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._group: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Portal users={self._users} thread={self._thread}>"

    def acquire(self) -> None:
        """Count one more user, starting the thread for the first one."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            if self._thread is not None:  # the last user has just left
                self._thread.join(1.0)
                if self._thread.is_alive():  # a coroutine refuses to be cancelled: leave it that loop
                    self._loop = None
            loop = self._loop if self._loop is not None and not self._loop.is_closed() else new_event_loop()
            self._loop, self._stop = loop, asyncio.Event()
            main = loop.create_task(self._main(self._stop))
            self._thread = threading.Thread(target=self._run, args=(loop, main), name="aioload-loop", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Count one user less, stopping the thread after the last one. Never waits."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._stop is not None:
                self.call(self._stop.set)

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended, if nobody uses it, at most until ``deadline`` (monotonic)."""
        thread = self._thread
        if self._users == 0 and thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close a loop that was kept. Its thread must have ended, or nothing is done."""
        loop = self._loop
        if loop is not None and not loop.is_running() and not loop.is_closed():
            loop.close()

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Have the loop call ``function(*args)`` soon; ``False`` if it is closed. Any thread; never waits."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # closed
            return False
        return True

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task of the loop's task group. On the loop thread only."""
        assert self._group is not None
        return self._group.create_task(coroutine)

    def run_here(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` on the loop in the caller's thread, for a loader without threads."""
        if self._loop is None or self._loop.is_closed():
            self._loop = new_event_loop()
        return self._loop.run_until_complete(coroutine)

    async def _main(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            await stop.wait()

    def _run(self, loop: asyncio.AbstractEventLoop, main: "asyncio.Task[None]") -> None:
        try:
            loop.run_until_complete(main)
        finally:
            if not self._keep_loop:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop over ``poll``."""
    return asyncio.SelectorEventLoop(selectors.PollSelector())
