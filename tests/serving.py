"""Serving: a small server of objects in this process, on 127.0.0.1, that refuses and stalls as it is told to."""

import re
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Refusal = tuple[int, dict[str, str]]
"""A status and headers."""


class ObjectServer:
    """What is served, and what was asked for.

    It answers GET and HEAD, with ranges, of ``objects``, by path; what lies in bucket ``b`` of S3 has the path
    ``/b/key``. It keeps connections open, as those do that it stands in for.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refusals: defaultdict[str, list[Refusal]] = defaultdict(list)
        """What the first requests for a path are answered."""
        self.knows_ranges = True
        self.cuts_off: set[str] = set()
        """Paths of which half a body is sent, and then the connection is closed."""
        self.stalls: set[str] = set()
        """Paths that are not answered before ``go``."""
        self.go, self.stalled = threading.Event(), threading.Event()
        self.num_requests: Counter[str] = Counter()
        self.targets: list[str] = []
        self.num_connections = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.served = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="object-server")
        self._thread.start()

    @property
    def url(self) -> str:
        """Its root, without a slash at the end."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.close_connections()
        self._server.server_close()  # which joins the threads


@contextmanager
def serving() -> Iterator[ObjectServer]:
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128
    served: ObjectServer

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.served.num_connections += 1
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        for each in list(self._connections):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed by now
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet: else the second waits 40 ms for the first to be acknowledged
    server: _Server

    def do_GET(self) -> None:
        served = self.server.served
        path = unquote(self.path.partition("?")[0])
        served.num_requests[path] += 1
        served.targets.append(self.path)
        if path in served.stalls:
            served.stalled.set()
            served.go.wait()
        if served.refusals[path]:
            status, headers = served.refusals[path].pop(0)
            self._answer(status, b"refused", headers)
        elif path not in served.objects:
            self._answer(404, b"no such object", {})
        else:
            self._send(served.objects[path], self.headers.get("Range") if served.knows_ranges else None)
            if path in served.cuts_off:
                self.close_connection = True

    do_HEAD = do_GET

    def _send(self, content: bytes, wanted: str | None) -> None:
        if wanted is None:
            self._answer(200, content, {})
            return
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()  # type: ignore[union-attr]
        start, stop = int(first), min(int(last or len(content)) + 1, len(content))
        if start >= len(content):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        else:
            part = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
            self._answer(206, memoryview(content)[start:stop], part)

    def _answer(self, status: int, body: Any, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        for name, value in (("ETag", '"x"'), ("Last-Modified", "Sat, 01 Jan 2000 00:00:00 GMT")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            cut = unquote(self.path) in self.server.served.cuts_off
            self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
