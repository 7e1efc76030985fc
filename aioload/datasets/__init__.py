"""Datasets: which samples there are, and how one is made."""

from aioload.datasets.base import Dataset
from aioload.datasets.files import FileDataset
from aioload.datasets.images import ImageError, ImageFolder, decode_image
from aioload.datasets.tensors import TensorDataset

__all__ = ["Dataset", "FileDataset", "ImageError", "ImageFolder", "TensorDataset", "decode_image"]
