"""Aside: a call that blocks, or runs an event loop, beside an event loop that is running in this thread."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_event_loop() -> bool:
    """Whether an event loop is running in this thread, so that it must not be held up."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def call(function: Callable[..., object], *args: Any) -> None:
    """Return when ``function(*args)`` has; the running loop goes on meanwhile. It must not raise.

    The thread is a daemon of its own: the loop's default executor may be busy, and would keep a stuck call until
    the interpreter's end. Cancelled, the call goes on.
    """
    loop = asyncio.get_running_loop()
    returned = loop.create_future()

    def finish() -> None:
        if not returned.done():
            returned.set_result(None)

    def run() -> None:
        function(*args)
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish)

    threading.Thread(target=run, name="aioload-aside", daemon=True).start()
    await returned


def run(function: Callable[..., object], *args: Any) -> None:
    """Call ``function(*args)``, which runs an event loop: here, or in a thread if one is running here already."""
    if not in_event_loop():
        function(*args)
        return
    thread = threading.Thread(target=function, args=args, name="aioload-aside", daemon=True)
    thread.start()
    thread.join()
