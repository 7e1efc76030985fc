"""Buffers: the bytes of arrays and tensors, beside a pickle, in a file that is there once for all who unpickle it.

Each process maps it for itself: what it writes to an array goes to pages of its own, and no other sees it; what it only
reads is memory that all of them share.
"""

import os
import pickle
from array import array
from collections import deque
from collections.abc import Iterator

from aioload.engine.segments import map_own, new_file
from aioload.layout import ALIGNMENT

_LEAST_BYTES = 512
"""What is smaller stays in the pickle: as an object of its own it would need more than it saves."""

_WORD = array("Q").itemsize


class Buffers:
    """What pickling by protocol 5 leaves out: to be its ``buffer_callback``, and to be written when it is done.

    Nothing is copied before that, so what is pickled must stay as it is.
    """

    def __init__(self) -> None:
        self._buffers: deque[pickle.PickleBuffer] = deque()

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer in; return whether it is to be pickled with all the rest instead."""
        with memoryview(buffer) as view:
            is_small = view.nbytes < _LEAST_BYTES or not view.contiguous
        if not is_small:
            self._buffers.append(buffer)
        return is_small

    def written(self) -> int | None:
        """Return a new file with all of them, one after the other, and let them go; ``None`` if there are none.

        Raises:
            OSError: There is no room.
        """
        if not self._buffers:
            return None
        file, lengths = new_file(0), array("Q")
        try:
            with open(file, "wb", closefd=False) as stream:
                while self._buffers:
                    with self._buffers.popleft().raw() as view:
                        lengths.append(view.nbytes)
                        stream.write(view)
                    stream.write(bytes(-lengths[-1] % ALIGNMENT))
                lengths.append(len(lengths))
                stream.write(lengths)
        except BaseException:
            os.close(file)
            raise
        return file


def buffers_in(file: int) -> Iterator[memoryview]:
    """Yield the buffers that were written to a file, which is closed; the mapping lives as long as any of them."""
    memory = map_own(file)
    end = len(memory) - _WORD
    (count,) = memory[end:].cast("Q")
    start = 0
    for length in memory[end - _WORD * count : end].cast("Q"):
        yield memory[start : start + length]
        start += length + -length % ALIGNMENT
