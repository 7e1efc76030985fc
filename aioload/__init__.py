"""A prefetching data loader for PyTorch: change one import, and the training step no longer waits."""

from aioload.cache import DiskCache, MemoryCache
from aioload.datasets import Dataset, FileDataset, ImageFolder, TensorDataset
from aioload.errors import AioloadError, ErrorContext, SampleError, error_context
from aioload.loader import DataLoader
from aioload.randomness import sample_rng
from aioload.readers import (
    AiofilesReader,
    FsspecReader,
    Hedge,
    LocalReader,
    MmapReader,
    ObjectStoreReader,
    Reader,
    ReadPolicy,
    SchemeReader,
)
from aioload.samplers import (
    BucketBatchSampler,
    InfiniteSampler,
    ShardedSampler,
    ShuffleSampler,
    StratifiedBatchSampler,
    WeightedSampler,
)
from aioload.stats import LoaderStats
from aioload.workers import get_worker_info

__version__ = "0.1.0"

__all__ = [
    "AiofilesReader",
    "AioloadError",
    "BucketBatchSampler",
    "DataLoader",
    "Dataset",
    "DiskCache",
    "ErrorContext",
    "FileDataset",
    "FsspecReader",
    "Hedge",
    "ImageFolder",
    "InfiniteSampler",
    "LoaderStats",
    "LocalReader",
    "MemoryCache",
    "MmapReader",
    "ObjectStoreReader",
    "ReadPolicy",
    "Reader",
    "SampleError",
    "SchemeReader",
    "ShardedSampler",
    "ShuffleSampler",
    "StratifiedBatchSampler",
    "TensorDataset",
    "WeightedSampler",
    "error_context",
    "get_worker_info",
    "sample_rng",
]
