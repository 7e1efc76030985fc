"""Readers: from a location to its bytes."""

from aioload.readers.local import read_file

__all__ = ["read_file"]
