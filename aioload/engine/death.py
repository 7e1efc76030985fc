"""Death: what there is to say of an engine process that has ended and was not to."""

import signal

from aioload.engine.batch import Batch
from aioload.errors import ErrorContext, ProcessDiedError, annotate

_HINT = (
    "It has written why to stderr. If it ran the script again, have that do what it does under "
    "if __name__ == '__main__':, as processes that are not forked need it. If it did not find the script, that must be "
    "a file, not standard input; or have processes forked, by multiprocessing_context='fork'."
)

_MOST_NAMES = 4
"""Samples that the message of an error names."""


def died_at_once(name: str) -> ProcessDiedError:
    """Return the error about a process that ended before it had been given anything."""
    return ProcessDiedError(f"{name} ended as it began. {_HINT}")


def died(name: str, code: int | None, samples: list[tuple[Batch, int]], waiting: list[Batch]) -> ProcessDiedError:
    """Return the error about a process that ended while it was to load.

    Args:
        name: The process, the beginning of a sentence.
        code: Its exit code, ``None`` if it has not ended but closed its connection.
        samples: Those it was loading, those farthest on first: their batches and positions.
        waiting: The first batch of each pass that it had not delivered.
    """
    how = f"{name} {_how_it_ended(code)}"
    if samples:
        error = ProcessDiedError(f"{how}. It was loading {_named(samples)}.")
        annotate(error, ErrorContext([batch.indices[position] for batch, position in samples], None, "process"))
    elif waiting:
        batch = waiting[0]
        what = f"a batch: {_named([(batch, position) for position in range(len(batch.indices))])}"
        error = ProcessDiedError(f"{how}. It had still to hand over {what if batch.indices else 'a batch'}.")
        annotate(error, ErrorContext(list(batch.indices), None, "process"))
    else:
        error = ProcessDiedError(f"{how}.")
    return error


def _named(samples: list[tuple[Batch, int]]) -> str:
    """Return what a message calls samples, of which there is at least one."""
    names = [batch.describe(position) for batch, position in samples[:_MOST_NAMES]]
    more = f" and {len(samples) - _MOST_NAMES} more" if len(samples) > _MOST_NAMES else ""
    return f"{', '.join(names)}{more}"


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "has closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    return f"was killed by signal {-code} ({name})"
