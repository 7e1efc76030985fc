"""Template: what the server that engine processes are forked off has imported, once for all of them.

Importing it imports the main module as well, which may need any part of this package; so nothing here imports it.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import threading
from multiprocessing import process, spawn, util

from aioload.engine.pages import use_large_pages
from aioload.engine.server import MAIN_VARIABLE


def _become_template() -> None:
    told = os.environ.pop(MAIN_VARIABLE, None)
    if told is None:  # not in the server
        return
    if told:
        _import_main(told)
    gc.collect()
    use_large_pages()
    gc.freeze()  # else a collection in a process would touch, and so copy, all that it shares with the server
    while signal.sigtimedwait({signal.SIGINT}, 0) is not None:  # blocked so far; it was for the consumer's process
        pass
    _have_interrupts_wait()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _have_interrupts_wait() -> None:
    """Have a process that is forked off this one begin with SIGINT blocked, until it is what it is to be.

    A terminal sends Ctrl-C to all processes: one that is to ignore it must not die of it before it could say so.
    """
    server = os.getpid()

    def block() -> None:
        if os.getppid() == server:  # else such a process has forked another one
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def unblock(_: object) -> None:
        if os.getppid() == server:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    os.register_at_fork(after_in_child=block)
    util.register_after_fork(block, unblock)  # called when what it is has been unpickled


def _import_main(told: str) -> None:
    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # noqa: SLF001  # so that it starts no processes
    try:
        # What goes wrong goes wrong again in each process, which says so.
        with contextlib.suppress(BaseException):
            spawn.prepare(json.loads(told))
    finally:
        del current._inheriting  # type: ignore[attr-defined]  # noqa: SLF001
    if threading.active_count() > 1:  # forks of a process with threads may find locks of theirs held for ever
        os.environ[MAIN_VARIABLE] = ""
        os.execv(sys.executable, sys.orig_argv)  # without the main module, which each process then imports itself


_become_template()
