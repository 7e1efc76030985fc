"""Opener: opens gates when the loader logs that it waits, so that a test knows the consumer to be waiting."""

import contextlib
import logging
from collections.abc import Iterator

from aioload.testing import Gates


class Opener(logging.Handler):
    """Keeps what the loader logs, and opens all gates when it does."""

    def __init__(self, gates: Gates) -> None:
        super().__init__()
        self.gates = gates
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.gates.open_all()


@contextlib.contextmanager
def opening_when_logged(gates: Gates) -> Iterator[Opener]:
    opener, logger = Opener(gates), logging.getLogger("aioload")
    logger.addHandler(opener)
    try:
        yield opener
    finally:
        logger.removeHandler(opener)
