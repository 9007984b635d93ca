"""Datasets: downloads into a cache, and readers whose images the protocols of :mod:`ctta.streams` take.

>>> import ctta
>>> stream = ctta.streams.continual(ctta.datasets.sample(), names=("fog", "snow"), limit=100, batch_size=50)
>>> [batch.domain for batch in stream]
['fog 5', 'fog 5', 'snow 5', 'snow 5']
"""

from ctta.datasets.arrays import PixelArray
from ctta.datasets.base import IGNORE_INDEX, IGNORE_LABEL, CorruptionDataset, Images
from ctta.datasets.cache import cache_dir, download, find
from ctta.datasets.catalog import DATASETS, Dataset
from ctta.datasets.cifar import CifarC, clean_cifar
from ctta.datasets.clean_images import CleanImages, read_clean_images
from ctta.datasets.corrupted import Corrupted, sample
from ctta.datasets.corrupted_folder import CorruptedFolder
from ctta.datasets.image_files import ImageFiles
from ctta.datasets.imagenet_c import ImageNetC
from ctta.datasets.segmentation import LabeledScenes
from ctta.datasets.streets import StreetScenes
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
