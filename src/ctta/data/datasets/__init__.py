"""Datasets: downloads into a cache, and readers whose images the protocols of :mod:`ctta.data.streams` take.

>>> import ctta
>>> stream = ctta.data.streams.continual(ctta.data.datasets.sample(), names=("fog", "snow"), limit=100, batch_size=50)
>>> [batch.domain for batch in stream]
['fog 5', 'fog 5', 'snow 5', 'snow 5']
"""

import warnings
from typing import Any

from ctta.data.datasets.base import IGNORE_INDEX, IGNORE_LABEL, CorruptionDataset, ImageDomain, PixelArray
from ctta.data.datasets.benchmarks import CifarC, ImageNetC, clean_cifar
from ctta.data.datasets.cache import cache_dir, download, find
from ctta.data.datasets.catalog import DATASETS, Dataset
from ctta.data.datasets.clean import ArrayDataset, CleanImages, DomainFolders, FolderDataset, read_clean_images, sample
from ctta.data.datasets.image_files import ImageFiles
from ctta.data.datasets.scenes import LabeledScenes, StreetScenes
from ctta.errors import DownloadError

__all__ = [
    "DATASETS",
    "IGNORE_INDEX",
    "IGNORE_LABEL",
    "ArrayDataset",
    "CifarC",
    "CleanImages",
    "CorruptionDataset",
    "Dataset",
    "DomainFolders",
    "DownloadError",
    "FolderDataset",
    "ImageDomain",
    "ImageFiles",
    "ImageNetC",
    "LabeledScenes",
    "PixelArray",
    "StreetScenes",
    "cache_dir",
    "clean_cifar",
    "download",
    "find",
    "read_clean_images",
    "sample",
]

#: Names of version 0.2. They work until version 0.4, with a DeprecationWarning.
_RENAMED = {"Corrupted": "ArrayDataset", "CorruptedFolder": "FolderDataset", "Images": "ImageDomain"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now called {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
