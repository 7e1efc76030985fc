"""Stand-in: moto's S3 server, in a process of its own, with one bucket."""

import subprocess
import sys
import urllib.request

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

BUCKET = "pictures"


class S3StandIn:
    """Ends with :meth:`close`, or with the process that made it."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-c", _SERVER], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._put(BUCKET, b"")

    def put(self, key: str, content: bytes) -> str:
        """Put an object into the bucket and return its URL."""
        self._put(f"{BUCKET}/{urllib.request.quote(key)}", content)  # type: ignore[attr-defined]
        return f"s3://{BUCKET}/{key}"

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _put(self, path: str, content: bytes) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{path}", data=content, method="PUT")
        request.add_header("Content-Type", "application/octet-stream")  # not a form, which takes minutes to parse
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
