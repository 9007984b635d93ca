"""The public datasets and checkpoints of the field, fetched once, verified, and kept in a cache folder."""

from ctta.datasets.cache import cache_folder, find, get
from ctta.datasets.catalog import DATASETS, Dataset
from ctta.datasets.errors import DownloadError

__all__ = ["DATASETS", "Dataset", "DownloadError", "cache_folder", "find", "get"]
