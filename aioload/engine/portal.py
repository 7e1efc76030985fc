"""Portal: the loader's own event loop, in its own thread, and the one way in.

The loop lives in a thread so that a loader works in a script, in a notebook, under any other event loop and
inside one that is running, and so that neither holds up the other. Its selector is ``poll``, which has no state
in the kernel: a forked child that closes its copy does not disturb the parent's, as it would with ``epoll``.
"""

import asyncio
import contextlib
import queue
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from aioload.engine import aside, threads

OnCrash: TypeAlias = Callable[[BaseException], None]

_GRACE_S = 1.0
"""Seconds that what a dataset has left on its loop gets to end, once it has been cancelled."""


class Portal:
    """An event loop in a daemon thread ``aioload-loop``, while anyone uses it.

    Args:
        keep_loop: Whether the loop object outlives its thread, until :meth:`close`, so that what an async dataset
            bound to it (sessions, connections) still works in the next epoch.
    """

    def __init__(self, *, keep_loop: bool) -> None:
        self._keep_loop = self._has_guests = keep_loop
        # Re-entrant: a garbage collection inside a guarded block may run a finalizer that calls release(), close().
        self._lock = threading.RLock()  # for users to come and go; _start() holds it while it waits for a thread
        self._end_lock = threading.RLock()  # for the thread's end and close(), one of which closes the loop
        self._here = threading.Lock()
        self._given_up = self._is_interrupted = False
        self._users: list[OnCrash] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_in_thread: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None  # as long as the thread is to go on
        self._is_due = False  # the thread is to be started by the first call
        self._group: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Portal users={len(self._users)} thread={self._thread}>"

    def acquire(self, on_crash: OnCrash, *, at_once: bool = True) -> None:
        """Count one more user, starting the thread for the first one. What it raises, :meth:`release` is to follow.

        Args:
            on_crash: Stands for the user; called, in the loop's thread, if the loop cannot go on.
            at_once: Whether the thread is started now, which takes milliseconds where all cores are busy, or by the
                first :meth:`call`.

        Raises:
            RuntimeError: The system has no thread to give.
        """
        with self._lock:
            self._users.append(on_crash)
            if self._stop is None and at_once:
                self._start()
            self._is_due = self._stop is None

    def release(self, on_crash: OnCrash) -> None:
        """Count one user less, stopping the thread after the last one. Never waits; again, it does nothing."""
        with self._lock:
            if on_crash in self._users:
                self._users.remove(on_crash)
            if not self._users:
                self._is_due = False
            if not self._users and self._stop is not None:
                self.call(self._stop.set)
                self._stop = None  # not before: an interrupt may come in between, and whoever closes does so again

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended, if nobody uses it, at most until ``deadline`` (monotonic)."""
        thread = self._thread
        if self._users or self._given_up or thread is None or thread is threading.current_thread():
            return
        thread.join(max(0.0, deadline - time.monotonic()))

    def give_up(self) -> None:
        """Never wait for the thread again: the interpreter ends, and has waited."""
        self._given_up = True

    def close(self) -> None:
        """Close a loop that was kept, now or when its thread ends. The portal must not be used again."""
        with self._end_lock:
            self._keep_loop = False
            if self._loop_in_thread is not None:
                return
        if self._here.acquire(blocking=False):  # else who runs the loop there closes it
            try:
                loop, self._loop = self._loop, None
                if loop is not None and not loop.is_closed():
                    aside.run(_shut, loop)
            finally:
                self._here.release()

    def abandon(self) -> None:
        """Close a loop that was kept, in a child of the process whose it is: what is bound to it is not ended here.

        A collection that found it open would say so, or fail, as it may end the loop's sockets before the loop.
        """
        loop = self._loop
        if loop is not None and not loop.is_running():  # as it seems to do if the parent's thread runs it
            loop.close()

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Have the loop call ``function(*args)`` soon; ``False`` if it is closed. Any thread; never waits for it."""
        if self._is_due:
            self._start_late()
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
        """Run ``coroutine`` on the loop in the caller's thread, for a loader without threads; one at a time."""
        with self._here:
            loop = self._loop = self._usable_loop()
            task = loop.create_task(coroutine)
            try:
                return self._complete(loop, task)
            except KeyboardInterrupt:
                self._is_interrupted = True
                raise
            finally:
                if not task.done():  # an interrupt: do not leave it half way
                    task.cancel()
                    self._complete(loop, loop.create_task(asyncio.wait([task], timeout=_GRACE_S)))
                if not self._keep_loop:  # closed meanwhile
                    self._loop = None
                    _shut(loop)

    def _complete(self, loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> Any:
        """Run a loop until a task is done, past whatever was to stop it when an interrupt cut another call short."""
        while True:
            try:
                return loop.run_until_complete(task)
            except RuntimeError:
                if not self._is_interrupted or task.done() or loop.is_closed():
                    raise

    def _start_late(self) -> None:
        with self._lock:
            if self._is_due:
                with contextlib.suppress(RuntimeError):  # without a thread nobody calls, as if it were closed
                    self._start()
                self._is_due = False

    def _start(self) -> None:
        previous = self._thread
        if previous is not None and previous is not threading.current_thread():  # its last user has just left
            previous.join(_GRACE_S)
        if previous is not None and previous.is_alive():  # a coroutine refuses to be cancelled: leave it that loop
            self._loop = None
        loop, mains = self._usable_loop(), queue.SimpleQueue[asyncio.Task[None] | None]()
        thread = threading.Thread(target=self._run, args=(loop, mains), name="aioload-loop", daemon=True)
        stop, main = asyncio.Event(), None
        try:
            threads.start(thread)
            main = loop.create_task(self._main(stop))  # scheduled before anything that anybody calls
            self._loop = self._loop_in_thread = loop
            self._thread, self._stop = thread, stop
            mains.put(main)
        except BaseException:  # no thread is to be had; or it is an interrupt, and the thread, if there is one, ends
            if main is not None:
                self._stop = None
                loop.call_soon_threadsafe(stop.set)
            mains.put(main)
            if main is None and loop is not self._loop:
                loop.close()
            raise

    def _usable_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None and not self._loop.is_closed():
            return self._loop
        loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        if not self._keep_loop:
            # Only our own callbacks run there, and that a busy machine is slow is no news (in asyncio's debug mode).
            loop.slow_callback_duration = float("inf")
        return loop

    async def _main(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            await stop.wait()

    def _run(self, loop: asyncio.AbstractEventLoop, mains: "queue.SimpleQueue[asyncio.Task[None] | None]") -> None:
        main, crash = mains.get(), None
        if main is None:
            return
        try:
            loop.run_until_complete(main)
        except BaseException as exc:  # the dataset stopped the loop, or a task of its own raised SystemExit
            crash = exc
        with self._end_lock:
            abandoned = self._loop_in_thread is not loop
            keep = self._keep_loop and crash is None and not abandoned
            if not abandoned:
                self._loop_in_thread = None
            if not abandoned and not keep:
                self._loop = None
        if crash is not None and not abandoned:
            self._stop = None
            for on_crash in tuple(self._users):
                on_crash(crash)
        if keep:
            return
        if self._has_guests:
            _shut(loop)
        else:
            loop.close()


def _shut(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that does not run, once what a dataset has left on it has ended, as ``asyncio.run`` does."""
    try:
        loop.run_until_complete(_end_leftovers(loop))
    finally:
        loop.close()


async def _end_leftovers(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_GRACE_S)
    await asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=_GRACE_S)
