"""Datasets: downloads into a cache, and readers whose images the protocols of :mod:`ctta.data.streams` take.

>>> import ctta
>>> stream = ctta.data.streams.continual(ctta.data.datasets.sample(), names=("fog", "snow"), limit=100, batch_size=50)
>>> [batch.domain for batch in stream]
['fog 5', 'fog 5', 'snow 5', 'snow 5']
"""

from ctta.data.datasets.base import IGNORE_INDEX, IGNORE_LABEL, CorruptionDataset, Images, PixelArray
from ctta.data.datasets.benchmarks import CifarC, ImageNetC, clean_cifar
from ctta.data.datasets.cache import cache_dir, download, find
from ctta.data.datasets.catalog import DATASETS, Dataset
from ctta.data.datasets.clean_images import CleanImages, read_clean_images
from ctta.data.datasets.corruptible import Corrupted, CorruptedFolder, sample
from ctta.data.datasets.image_files import ImageFiles
from ctta.data.datasets.scenes import LabeledScenes, StreetScenes
from ctta.errors import DownloadError

__all__ = [
    "DATASETS",
    "IGNORE_INDEX",
    "IGNORE_LABEL",
    "CifarC",
    "CleanImages",
    "Corrupted",
    "CorruptedFolder",
    "CorruptionDataset",
    "Dataset",
    "DownloadError",
    "ImageFiles",
    "ImageNetC",
    "Images",
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
