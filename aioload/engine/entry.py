"""Entry: what a new engine process does before and after all that it is asked for, in its main thread."""

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
from multiprocessing.connection import Connection

import torch

from aioload.engine import abroad
from aioload.engine.channel import Channel
from aioload.engine.child import Child
from aioload.engine.messages import Broken, received, send
from aioload.engine.parcel import Parcel
from aioload.engine.settings import Part
from aioload.errors import TransferError, text_of

_END_S = 1.0
"""Seconds that threads get to end; one that is stuck in a read would keep the process for ever."""


def main(parcel: Parcel, end: socket.socket, life: Connection, part: Part) -> None:
    """Load what is asked for until the other side is gone. In the main thread of a new process.

    Args:
        parcel: What it is given.
        end: Its end of the channel.
        life: Its end of a pipe that the consumer's process closes when this one has ended, or that is closed for it.
        part: What it is to do.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with(life.fileno())
    _let_others_finish()
    torch.set_num_threads(1)  # as torch's workers: there are threads enough
    channel = Channel(end)
    if not parcel.contents and parcel.error is None:
        files = _files_of_contents(channel)
        if not files:
            return
        parcel.unpack(*files)
    if parcel.error is not None:
        error = TransferError(
            f"The dataset could not be unpacked in the engine process: {text_of(parcel.error)}. Define what it is made "
            "of in modules that can be imported, not at a prompt or by python -c; or have processes forked, by "
            "multiprocessing_context='fork'."
        )
        error.__cause__ = parcel.error
        send(channel, Broken(abroad.pack_error(error)))
        return
    gc.freeze()  # what is there now stays: a collection would touch, and so copy, what is shared with who forked us
    child: Child | None = None
    try:
        child = Child(channel, part, **parcel.contents)
        child.serve()
    except BaseException as exc:
        send(channel, Broken(abroad.pack_error(exc)))
        raise
    finally:
        if child is not None:
            child.close(_END_S)


def _files_of_contents(channel: Channel) -> list[int]:
    """Return what the parcel is to be filled from; nothing if the other side is gone."""
    files = []
    while (came := channel.receive()) is not None:
        message, file = came
        assert file is not None
        files.append(file)
        if received(message).is_last:
            return files
    return []


def _end_with(life: int) -> None:
    """Have the kernel end this process when the other end of a pipe is closed, which says that the consumer's is gone.

    That is certain even where code that does not return has the interpreter: what SIGIO does by default is to end it.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it was closed before
        os._exit(0)


def _let_others_finish() -> None:
    """Have the kernel not interrupt whoever is at work, the training step say, when a read here is done.

    This process gets its share of the processor as ever. Where all are busy it takes it at the next tick, not at once.
    """
    with contextlib.suppress(OSError):  # forbidden here
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else somebody has chosen
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
