"""A prefetching data loader for PyTorch: change one import, and the training step no longer waits."""

from aioload.datasets import Dataset, FileDataset, ImageFolder, TensorDataset
from aioload.errors import AioloadError, ErrorContext, error_context
from aioload.loader import DataLoader
from aioload.stats import LoaderStats

__version__ = "0.1.0"

__all__ = [
    "AioloadError",
    "DataLoader",
    "Dataset",
    "ErrorContext",
    "FileDataset",
    "ImageFolder",
    "LoaderStats",
    "TensorDataset",
    "error_context",
]
