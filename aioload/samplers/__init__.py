"""Samplers: which samples come when; random by seed and epoch, shared among ranks, resumable anywhere."""

from aioload.samplers.base import SeekableSampler
from aioload.samplers.bucket import BucketBatchSampler
from aioload.samplers.infinite import InfiniteSampler
from aioload.samplers.seekable import Seekable
from aioload.samplers.sharded import ShardedSampler
from aioload.samplers.shuffle import ShuffleSampler
from aioload.samplers.stratified import StratifiedBatchSampler
from aioload.samplers.weighted import WeightedSampler

__all__ = [
    "BucketBatchSampler",
    "InfiniteSampler",
    "Seekable",
    "SeekableSampler",
    "ShardedSampler",
    "ShuffleSampler",
    "StratifiedBatchSampler",
    "WeightedSampler",
]
