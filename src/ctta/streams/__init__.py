"""Streams: the protocols in which the domains of a dataset arrive.

A stream yields :class:`Batch` after :class:`Batch`. It has a length, a position that can be saved and restored, the
names of its domains, and a hash: results are comparable if their hashes agree. Only :func:`live`, which reads a running
camera, has no length and no hash.
"""

from ctta.streams.live import LiveStream, live
from ctta.streams.orders import corruption_order
from ctta.streams.protocols import continual, correlated, gradual, mixed, rounds, single
from ctta.streams.sources import acdc, cityscapes, folder, image_folder, in_memory, streets
from ctta.streams.stream import Batch, Segment, Stream

__all__ = [
    "Batch",
    "LiveStream",
    "Segment",
    "Stream",
    "acdc",
    "cityscapes",
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
    "single",
    "streets",
]
