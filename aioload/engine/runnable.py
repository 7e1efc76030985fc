"""Runnable: whether threads have a processor, or wait for one, and so are not waiting for a storage."""

import contextlib
import os
import threading
from collections.abc import Iterable


def is_any_runnable(threads: Iterable[threading.Thread]) -> bool:
    """Return whether any of these threads of this process runs or could; ``False`` where the system does not say.

    It takes some 10 us a thread. One that waits for the interpreter lock does not run.
    """
    return any(thread.native_id is not None and _state_of(thread.native_id) == b"R" for thread in threads)


def _state_of(native_id: int) -> bytes:
    with contextlib.suppress(OSError):  # not on Linux, or it has just ended
        file = os.open(f"/proc/self/task/{native_id}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, _, rest = os.read(file, 512).rpartition(b")")  # behind the name, which may be anything
            return rest[1:2]
        finally:
            os.close(file)
    return b""
