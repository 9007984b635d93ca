"""Data sets: downloads into a cache, and readers that give images to streams."""

from ctta.datasets.base import IGNORE_INDEX, CorruptionDataset, Images
from ctta.datasets.cache import cache_dir, download, find
from ctta.datasets.catalog import DATASETS, Dataset
from ctta.datasets.cifar import CifarC, clean_cifar
from ctta.datasets.corrupted import Corrupted, sample
from ctta.datasets.imagenet_c import ImageNetC
from ctta.datasets.streets import StreetScenes
from ctta.errors import DownloadError

__all__ = [
    "DATASETS",
    "IGNORE_INDEX",
    "CifarC",
    "Corrupted",
    "CorruptionDataset",
    "Dataset",
    "DownloadError",
    "ImageNetC",
    "Images",
    "StreetScenes",
    "cache_dir",
    "clean_cifar",
    "download",
    "find",
    "sample",
]
