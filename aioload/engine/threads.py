"""Threads: how they are started, where an interrupt may come in the middle of it."""

import threading


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: The system has no more threads to give, or the interpreter is about to exit.
        KeyboardInterrupt: It came meanwhile, and nobody can tell whether the thread is there.
    """
    try:
        thread.start()
    except RuntimeError as exc:
        if isinstance(exc.__context__, KeyboardInterrupt):  # over which a condition of start()'s own has fallen
            raise exc.__context__ from None
        raise
