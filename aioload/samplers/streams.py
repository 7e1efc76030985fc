"""Stream: random words that a seed and a few numbers come to, each by its counter.

The words are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) with
the finaliser of Stafford's variant 13. They depend on 64-bit arithmetic alone, so they are the same on every platform
and with every version of NumPy, which promises that of its bit generators but not of its distributions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


@dataclass(frozen=True, slots=True)
class Stream:
    """2**64 random words, of which any may be asked for at any time.

    Attributes:
        start: The word that counter 0 is mixed from.
        step: What each further counter adds to it. Odd, and of each stream's own: two streams that share a word
            do not share the words after it.
    """

    start: int
    step: int

    @staticmethod
    def of(seed: int, *numbers: int) -> "Stream":
        """Return the stream of a seed and what else tells it from others: a purpose, an epoch.

        All 64 bits of each go in. Neighbouring seeds, epochs and purposes have unrelated streams.
        """
        state = _mix(seed + _GOLDEN)
        for number in numbers:
            state = _mix(_mix(state + _GOLDEN) ^ _mix(number + 2 * _GOLDEN))
        return Stream(_mix(state + _GOLDEN), _mix(state + 2 * _GOLDEN) | 1)

    def word(self, counter: int) -> int:
        """Return the word of one counter."""
        return _mix(self.start + counter * self.step)

    def words(self, counters: Words) -> Words:
        """Return the words of an array of counters, in a new array of its shape."""
        words = counters * np.uint64(self.step)
        words += np.uint64(self.start)
        for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
            words ^= words >> np.uint64(shift)
            words *= np.uint64(factor)
        words ^= words >> np.uint64(_SHIFTS[-1])
        return words

    def uniform(self, counters: Words) -> NDArray[np.float64]:
        """Return numbers of ``[0, 1)``, multiples of 2**-53, one per counter."""
        return (self.words(counters) >> np.uint64(11)) * np.float64(2.0**-53)


def _mix(word: int) -> int:
    """Return the finaliser of SplitMix64: a bijection of 64-bit words in which each bit depends on all."""
    word &= _MASK
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        word = ((word ^ (word >> shift)) * factor) & _MASK
    return word ^ (word >> _SHIFTS[-1])
