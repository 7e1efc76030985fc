"""Shortage: what the system refuses for want of it, said with what it was needed for and what to do."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

_ADVICE = {
    errno.EMFILE: "This process may have {files} open files and sockets (ulimit -n), and needs about 15 and 5 for each "
    "engine process, beside what else it has open. Allow it more, or ask for fewer processes.",
    errno.ENFILE: "The whole system has too many files open. Ask for fewer processes.",
    errno.EFBIG: "Memory that processes share is a file to the system, and none may be larger than {bytes} bytes here "
    "(ulimit -f). Allow larger ones: of 256 KiB, of a whole batch, and of all arrays of the dataset.",
    errno.ENOSPC: "There is no room for memory that processes share. Lower prefetch_bytes, prefetch_factor or "
    "batch_size, or ask for fewer processes.",
    errno.ENOMEM: "There is not enough memory. Lower prefetch_bytes, prefetch_factor or batch_size, or ask for fewer "
    "processes.",
}


@contextlib.contextmanager
def explained(needed: str) -> Iterator[None]:
    """Have an error of the system's for want of something say what was needed, and what to do; others as they are.

    Args:
        needed: What could not be had then.
    """
    try:
        yield
    except OSError as exc:
        code = exc.errno or 0
        if code not in _ADVICE or exc.strerror != os.strerror(code):  # it says so already
            raise
        limits = {"files": resource.RLIMIT_NOFILE, "bytes": resource.RLIMIT_FSIZE}
        advice = _ADVICE[code].format_map({name: resource.getrlimit(limit)[0] for name, limit in limits.items()})
        raise OSError(code, f"{exc.strerror}: {needed} could not be had. {advice}") from exc
