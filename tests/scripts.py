"""Scripts: short programs, each run by a Python process of its own from its first line to the interpreter's end."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

# Importing torch takes seconds, so one process does it, and a script is the rest of the life of a fork of it, at
# module level. The first line printed is the fork's number, the second its exit code.
_NURSERY = """
import gc, json, os, sys
import slow
gc.freeze()  # else the end of each takes another half second
for _line in sys.stdin:
    _pid = os.fork()
    if _pid == 0:
        break
    print(_pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]), flush=True)
else:
    os._exit(0)
_script, _out, _err = json.loads(_line)
for _number, _name in enumerate(("/dev/null", _out, _err)):
    os.dup2(os.open(_name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), _number)
exec(compile(open(_script).read(), _script, "exec"))
"""


class Ended(NamedTuple):
    """How a script ended: its exit code (a signal's number negated) and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def num_tracebacks(self) -> int:
        """How many there are in ``err``."""
        return self.err.count("Traceback (most recent call last)")


def environment() -> dict[str, str]:
    """Return the environment in which a script can import what is here."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent)}


class Nursery:
    """Runs scripts, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._files = [folder / name for name in ("script.py", "out", "err")]
        command, pipe = [sys.executable, "-c", _NURSERY], subprocess.PIPE
        self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, env=environment())

    def run(self, script: str, *, within_s: float = 20.0) -> Ended:
        """Run a script and return how it ended.

        After ``within_s`` seconds it is killed and the test fails.
        """
        source, out, err = self._files
        source.write_text(textwrap.dedent(script))
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(path) for path in self._files]).encode() + b"\n")
        pid = int(self._answer(60.0) or 0)
        code = self._answer(within_s)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            self._answer(60.0)
            pytest.fail(f"Not at its end after {within_s} s.\n{out.read_text()}{err.read_text()}")
        return Ended(int(code), out.read_text(), err.read_text())

    def run_quietly(self, script: str) -> str:
        """Run a script that must end well and report nothing; return what it printed."""
        ended = self.run(script)
        assert (ended.code, ended.err) == (0, ""), f"It ended with {ended.code}.\n{ended.out}{ended.err}"
        return ended.out

    def close(self) -> None:
        """End the process that scripts are forked from."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _answer(self, timeout_s: float) -> bytes | None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        return self._process.stdout.readline() if readable else None
