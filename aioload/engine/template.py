"""Template: what the server that engine processes are forked off has imported, once for all of them."""

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from multiprocessing import process, spawn

import aioload.engine.child  # noqa: F401

_VARIABLE = "AIOLOAD_MAIN"

_NAMES = ("sys_path", "sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")


@contextlib.contextmanager
def telling_main() -> Iterator[None]:
    """Have a server that is started here import the main module, as each process would have to by itself."""
    data = spawn.get_preparation_data("aioload")
    os.environ[_VARIABLE] = json.dumps({name: data[name] for name in _NAMES if name in data})
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def _import_main() -> None:
    told = os.environ.pop(_VARIABLE, None)
    if told is None:  # not in the server
        return
    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # noqa: SLF001  # so that it starts no processes
    try:
        # What goes wrong goes wrong again in each process, which says so.
        with contextlib.suppress(BaseException):
            spawn.prepare(json.loads(told))
    finally:
        del current._inheriting  # type: ignore[attr-defined]  # noqa: SLF001
    gc.collect()
    gc.freeze()  # else a collection in a process would touch, and so copy, all that it shares with the server


_import_main()
