"""Readers: from a location to its bytes."""

from aioload.cache import Cache, DiskCache, MemoryCache
from aioload.readers.aiofiles import AiofilesReader
from aioload.readers.base import BytesLike, Reader, is_async, num_bytes
from aioload.readers.local import LocalReader, read_file
from aioload.readers.mapped import MmapReader
from aioload.readers.policy import ReadPolicy

__all__ = [
    "AiofilesReader",
    "BytesLike",
    "Cache",
    "DiskCache",
    "LocalReader",
    "MemoryCache",
    "MmapReader",
    "ReadPolicy",
    "Reader",
    "is_async",
    "num_bytes",
    "read_file",
]
