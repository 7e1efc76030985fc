"""The comparison of loaders on small objects in a distant store.

Usage: python -m benchmarks.objects [--num N] [--size BYTES] [--delay-ms MS] [--reads N] [--rounds N] [--json FILE]
"""

import argparse
import json
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from obstore.store import S3Store

import aioload
from benchmarks.object_server import body_of, object_server
from benchmarks.paired import Comparison, Rival, compare, machine
from benchmarks.rivals import Files, aioload_epoch, torch_epoch_started

BATCH_SIZE = 64
BUCKET = "samples"
KEYS: Any = {"access_key_id": "any", "secret_access_key": "any", "region": "us-east-1"}
OVER_HTTP: Any = {"client_options": {"allow_http": True}}


def decode(data: bytes, index: int) -> np.ndarray[Any, Any]:
    """Return the bytes as an array of its own."""
    return np.frombuffer(data, np.uint8).copy()


class Store:
    """Reads from the bucket by the client that aioload uses; made anew in each process that reads."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._store: Any = None

    def read(self, url: str) -> bytes:
        """Return an object."""
        if self._store is None:
            self._store = S3Store(BUCKET, endpoint=self._endpoint, **KEYS, **OVER_HTTP)
        return bytes(self._store.get(url.rpartition("/")[2]).bytes())


def compare_objects(endpoint: str, arguments: argparse.Namespace) -> Comparison:
    """Let aioload, with its reader on threads and on the loop, and torch, its processes started, take turns."""
    urls = [f"s3://{BUCKET}/{number:08d}" for number in range(arguments.num)]
    files = aioload.FileDataset(urls, decode)
    reader = aioload.ObjectStoreReader(endpoint=endpoint, **KEYS, **OVER_HTTP)
    ours: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_concurrent_reads": arguments.reads}
    by_scheme = aioload.SchemeReader({"s3": reader})
    rivals = [
        Rival(name="aioload", epoch=aioload_epoch(files, reader=by_scheme, **ours), group="aioload"),
        Rival(name="aioload, awaited", epoch=aioload_epoch(files, reader=reader, **ours), group="aioload, awaited"),
    ]
    plain = Files(urls, decode, Store(endpoint).read)
    # Forked off a server that has not used the client: its threads, which aioload's epochs start, are not in a child.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.rivals", "obstore.store"])
    theirs: dict[str, Any] = {"batch_size": BATCH_SIZE, "multiprocessing_context": "forkserver"}
    for num_workers in arguments.workers:
        name = f"torch, {num_workers} process{'es' if num_workers > 1 else ''}"
        epoch = torch_epoch_started(plain, num_workers=num_workers, **theirs)
        rivals.append(Rival(name=f"{name}, started", epoch=epoch, group="torch's worker processes"))
    title = (
        f"objects: {arguments.num:,} of {arguments.size:,} bytes after {arguments.delay_ms} ms, "
        f"batches of {BATCH_SIZE}, {arguments.reads} reads at once"
    )
    return compare(title, rivals, num_rounds=arguments.rounds)


def check(endpoint: str, size: int) -> None:
    """Read an object by aioload's reader, and find it as it should be."""
    reader = aioload.ObjectStoreReader(endpoint=endpoint, **KEYS, **OVER_HTTP)
    if reader.read_blocking(f"s3://{BUCKET}/00000123") != body_of(123, size):
        message = "The server does not give what it should."
        raise RuntimeError(message)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objects", description=__doc__)
    parser.add_argument("--num", type=int, default=10_000, help="number of objects")
    parser.add_argument("--size", type=int, default=20_000, help="bytes of each")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="how long the server waits with each answer")
    parser.add_argument("--reads", type=int, default=64, help="aioload's num_concurrent_reads")
    parser.add_argument("--workers", type=int, nargs="+", default=[8], help="torch's worker processes")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one of warming up")
    parser.add_argument("--json", type=Path, help="write the figures of every round to this file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    with object_server(arguments.delay_ms / 1000, arguments.size) as endpoint:
        check(endpoint, arguments.size)
        comparison = compare_objects(endpoint, arguments)
    print(comparison.table())
    if arguments.json:
        report = {"machine": machine(), "comparisons": [comparison.as_json()]}
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
