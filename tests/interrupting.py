"""Interrupting: Ctrl-C anywhere, one place after the other."""

import dis
import gc
import os
import sys
from collections import Counter
from types import CodeType, FrameType, ModuleType
from typing import Any

import aioload


class InterruptedAt:
    """Ctrl-C at a given place of the loader's own code, of those where Python sees to signals.

    These are the beginning of a function, the end of a call of what is not written in Python, and a loop's way back.
    They are counted from where ``with`` begins.

    Args:
        number: Of the place, from 1.
        others: Modules of others that count as well.
        most_visits: How often one and the same place counts, ``None`` for as often as one comes by.

    Attributes:
        num_places: Those that there have been so far.
    """

    def __init__(self, number: int, *others: ModuleType, most_visits: int | None = None) -> None:
        self.num_places, self._number = 0, number
        self._files = os.path.dirname(aioload.__file__), *(str(module.__file__) for module in others)
        self._latest: dict[FrameType, str] = {}
        self._codes: dict[CodeType, bytes] = {}
        self._most_visits, self._visits = most_visits, Counter[tuple[CodeType, int]]()

    def __enter__(self) -> "InterruptedAt":
        self._before = sys.gettrace()
        gc.disable()  # what comes in a finalizer is swallowed by Python
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()
        self._latest.clear()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and frame.f_back in self._latest:
            self._latest[frame.f_back] = "a call of Python"
        code = frame.f_code
        if not code.co_filename.startswith(self._files):
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self._latest[frame] = "RESUME"
        elif event == "exception":
            self._latest[frame] = "a call that has not ended"
        elif event == "opcode":
            before = self._latest[frame]
            self._latest[frame] = dis.opname[self._codes.setdefault(code, code.co_code)[frame.f_lasti]]
            if before == "RESUME" or before.startswith(("CALL", "JUMP_BACKWARD")):
                if self._most_visits is not None:
                    place = code, frame.f_lasti
                    self._visits[place] += 1
                    if self._visits[place] > self._most_visits:
                        return self._trace
                self.num_places += 1
                if self.num_places == self._number:
                    raise KeyboardInterrupt
        return self._trace
