"""Readers: from a location to its bytes."""

from aioload.readers.local import read_file
from aioload.readers.policy import ReadPolicy

__all__ = ["ReadPolicy", "read_file"]
