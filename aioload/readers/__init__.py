"""Readers: from a location to its bytes."""

from aioload.readers.aiofiles import AiofilesReader
from aioload.readers.base import BytesLike, Reader, is_async, num_bytes
from aioload.readers.hedge import Hedge
from aioload.readers.local import LocalReader, read_file
from aioload.readers.mapped import MmapReader
from aioload.readers.policy import ReadPolicy

__all__ = [
    "AiofilesReader",
    "BytesLike",
    "Hedge",
    "LocalReader",
    "MmapReader",
    "ReadPolicy",
    "Reader",
    "is_async",
    "num_bytes",
    "read_file",
]
