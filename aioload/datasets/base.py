"""Dataset: the base of the datasets in this package, and how a staged one is read in one go."""

import abc
from typing import Any, TypeVar

import torch.utils.data

from aioload.errors import ErrorContext, annotate
from aioload.readers import read_file
from aioload.types import StagedDataset

T_co = TypeVar("T_co", covariant=True)


class Dataset(torch.utils.data.Dataset[T_co], abc.ABC):
    """A sample by index, for a known number of samples.

    It is a ``torch.utils.data.Dataset``, so that frameworks which ask with ``isinstance`` accept it. The
    loader itself needs no base class: any object with the two methods will do.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def __getitem__(self, index: Any) -> T_co:
        """Return the sample of ``index``, owned by the caller. Several threads may call it at once."""


def read_sample(dataset: StagedDataset[T_co], index: Any) -> T_co:
    """Return the sample of ``index``, read and decoded on the calling thread.

    A staged dataset's ``__getitem__``, for loaders that do not know its stages.

    Args:
        dataset: The dataset whose ``location`` and ``decode`` are called.
        index: The sample's index.

    Returns:
        What ``dataset.decode`` returned.

    Raises:
        Exception: What ``location``, the read or ``decode`` raised, that very object. The last two add a note
            that says which file it was (``aioload.error_context`` reads it back).
    """
    location = dataset.location(index)
    stage = "read"
    try:
        data = read_file(location)
        stage = "decode"
        return dataset.decode(data, index)
    except Exception as error:
        annotate(error, ErrorContext(index, location, stage))
        raise
