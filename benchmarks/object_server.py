"""Object server: as much of S3 as reading objects takes, in a process of its own, each answer after a delay.

It gives objects of one size whatever they are called, with a body that says which it is, so that what arrives can be
checked. Everything else that S3 does, the signature of requests above all, it ignores.
"""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_KEY = re.compile(rb"^GET /[^/ ]+/(\d+) HTTP/1\.1\r\n")
_END_OF_HEAD = b"\r\n\r\n"


def body_of(number: int, size: int) -> bytes:
    """Return the content of the object with this number: the number, over and over."""
    text = b"%08d" % number
    return (text * (size // len(text) + 1))[:size]


@contextmanager
def object_server(delay_s: float, size: int) -> Iterator[str]:
    """Give the URL of a server that is started, and ended."""
    command = [sys.executable, "-m", "benchmarks.object_server", str(delay_s), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


class _Connection(asyncio.Protocol):
    def __init__(self, delay_s: float, size: int) -> None:
        self._delay_s, self._size, self._received = delay_s, size, b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while _END_OF_HEAD in self._received:
            head, _, self._received = self._received.partition(_END_OF_HEAD)
            self._loop.call_later(self._delay_s, self._answer, head)

    def _answer(self, head: bytes) -> None:
        asked = _KEY.match(head)
        if asked is None:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        self._transport.write(
            b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "%s"\r\n'
            b"Last-Modified: Sat, 01 Jan 2000 00:00:00 GMT\r\n\r\n%s"
            % (self._size, asked[1], body_of(int(asked[1]), self._size))
        )


async def _serve(delay_s: float, size: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(delay_s, size), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), int(sys.argv[2])))
