"""Server: the process that engine processes are forked off, and how it is begun.

It is :mod:`multiprocessing`'s own, and has imported what they all need: what :mod:`~aioload.engine.template` says.
"""

import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver, spawn
from multiprocessing.context import BaseContext
from typing import Any

_PRELOAD = "aioload.engine.template"

MAIN_VARIABLE = "AIOLOAD_MAIN"
"""In the environment of the server that is started: what its main module is."""

_NAMES = ("sys_path", "sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")


def new_context(context: Any) -> BaseContext:
    """Return how engine processes are started: as ``multiprocessing_context`` says, or by a server that forks them.

    The server is a process that has done nothing but import, so that each further one takes milliseconds.
    """
    if context is not None and context.get_start_method() != "forkserver":
        return context  # type: ignore[no-any-return]
    chosen = multiprocessing.get_context("forkserver")
    if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:  # noqa: SLF001
        chosen.set_forkserver_preload(["__main__", _PRELOAD])
    try:
        with _telling_main():
            forkserver.ensure_running()
    except OSError:  # its socket needs a folder for temporary files, and there is none
        return multiprocessing.get_context("spawn")
    return chosen


def start_server(context: Any) -> None:
    """Have the server that forks processes begin to import things, which takes seconds. Never waits."""
    is_server = context is None or context.get_start_method() == "forkserver"
    if is_server and not multiprocessing.current_process().daemon:
        with contextlib.suppress(RuntimeError):  # the main module is being imported: who wants processes is told
            new_context(None)


@contextlib.contextmanager
def _telling_main() -> Iterator[None]:
    """Have a server that is started here import the main module, as each process would have to by itself."""
    data = spawn.get_preparation_data("aioload")
    os.environ[MAIN_VARIABLE] = json.dumps({name: data[name] for name in _NAMES if name in data})
    try:
        yield
    finally:
        os.environ.pop(MAIN_VARIABLE, None)
