"""The public datasets and checkpoints of the field, fetched once, verified, and kept in a cache folder."""

from ctta.data.datasets import DATASETS, Dataset
from ctta.data.errors import DownloadError
from ctta.data.store import cache_folder, find, get

__all__ = ["DATASETS", "Dataset", "DownloadError", "cache_folder", "find", "get"]
