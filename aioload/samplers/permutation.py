"""Permutation: a random order of range(n), any part of which can be computed without the rest."""

import math

import numpy as np
from numpy.typing import NDArray

from aioload.samplers.streams import Stream, Words

TABLE_SIZE = 4096
"""Up to this many entries the order is made by sorting random words: uniform, and 32 KB at most."""

NUM_ROUNDS = 8
"""Of 10**7 pairs of entries of size 4900, a chi-square of the differences tells 4 rounds from chance by 900 standard
deviations, 5 by 20 and 6 not at all; two more are the margin, for 6 ns an entry."""

_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Permutation:
    """A random order of ``range(size)``, drawn by a stream; it holds no more than a small table.

    Larger ones are a Feistel network: a value is a pair ``left * width + right``, and each round adds a random function
    of one half to the other, modulo that half's range, which can be undone whatever the function. The halves are about
    the square root of ``size`` each, not powers of two, so that hardly any pair is ``size`` or more; where one is,
    the network is walked again from there until it comes out inside (Black and Rogaway, "Ciphers with arbitrary
    finite domains", 2002, sections 4 and 5).

    Args:
        size: How many entries, at most 2**62.
        stream: Where the randomness comes from. The same stream and size give the same order.
    """

    def __init__(self, size: int, stream: Stream) -> None:
        self.size = size
        self._table: NDArray[np.int64] | None = None
        if size <= TABLE_SIZE:
            self._table = np.argsort(stream.words(np.arange(size, dtype=np.uint64)), kind="stable").astype(np.int64)
            return
        self._width = max(1, math.isqrt(size))
        self._height = max(1, -(-size // self._width))
        words = [np.uint64(stream.word(counter)) for counter in range(2 * NUM_ROUNDS)]
        self._keys = [(words[i], words[i + 1] | np.uint64(1)) for i in range(0, len(words), 2)]

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entries at an array of positions, each of ``range(size)``, in a new array."""
        if self._table is not None:
            return self._table[positions]
        values = self._walk(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= np.uint64(self.size))
        while outside.size:
            again = self._walk(values[outside])
            values[outside] = again
            outside = outside[again >= np.uint64(self.size)]
        return values.view(np.int64)

    def whole(self) -> NDArray[np.int64]:
        """Return all entries."""
        return self.at(np.arange(self.size, dtype=np.int64))

    def _walk(self, values: Words) -> Words:
        width, height = np.uint64(self._width), np.uint64(self._height)
        left = values // width
        right = values - left * width
        for number, (offset, factor) in enumerate(self._keys):
            if number % 2 == 0:
                left = _add(left, _random_below(height, right, offset, factor), height)
            else:
                right = _add(right, _random_below(width, left, offset, factor), width)
        left *= width
        left += right
        return left


def _random_below(bound: np.uint64, values: Words, offset: np.uint64, factor: np.uint64) -> Words:
    """Return a number below ``bound`` for each value: two multiplications, of which the upper half of bits is taken."""
    mixed = values + offset
    mixed *= factor
    mixed ^= mixed >> _HALF
    mixed *= _FACTOR
    mixed >>= _HALF
    mixed *= bound
    mixed >>= _HALF
    return mixed


def _add(values: Words, others: Words, modulus: np.uint64) -> Words:
    """Return the sums modulo ``modulus``, in the memory of ``others``; both must be below it."""
    others += values
    np.minimum(others, others - modulus, out=others)  # below the modulus the difference wraps to a huge number
    return others
