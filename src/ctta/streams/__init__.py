"""Streams: readers of data, and the protocols in which its domains come.

A stream gives :class:`Batch` after :class:`Batch`, has a length, a position that can be saved and set, the names of its
domains, and a hash by which results are comparable or visibly not. Only :func:`live`, a
camera that is looking now, has no length, no hash and no past.
"""

from ctta.errors import DataError
from ctta.streams.arrays import in_memory
from ctta.streams.cifar import clean_cifar
from ctta.streams.cifar_c import CifarC
from ctta.streams.corrupted import Corrupted
from ctta.streams.folders import ImageNetC, folder, image_folder
from ctta.streams.live import LiveStream, live
from ctta.streams.orders import corruption_order
from ctta.streams.protocols import continual, correlated, gradual, mixed, rounds, single
from ctta.streams.sample import sample
from ctta.streams.stream import Batch, Images, Segment, Stream
from ctta.streams.street_scenes import acdc, cityscapes
from ctta.streams.streets import StreetScenes, streets

__all__ = [
    "Batch",
    "CifarC",
    "Corrupted",
    "DataError",
    "ImageNetC",
    "Images",
    "LiveStream",
    "Segment",
    "Stream",
    "StreetScenes",
    "acdc",
    "cityscapes",
    "clean_cifar",
    "continual",
    "correlated",
    "corruption_order",
    "folder",
    "gradual",
    "image_folder",
    "in_memory",
    "live",
    "mixed",
    "rounds",
    "sample",
    "single",
    "streets",
]
