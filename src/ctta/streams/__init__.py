"""Streams: the protocols in which the domains of a dataset arrive.

A stream yields :class:`Batch` after :class:`Batch`. It has a length, a position that can be saved and restored, the
names of its domains, and a hash: results are comparable if their hashes agree. :func:`live`, which reads a running
camera, has no length and no hash, and :func:`ccc` has no length unless it is given one.
"""

from ctta.streams.accuracy import AccuracyMatrix, measure_accuracy
from ctta.streams.builders import CorruptionSequence
from ctta.streams.ccc import EndlessStream, ccc
from ctta.streams.composition import Composition
from ctta.streams.correlation import correlated, label_shift, long_tail, mixed_correlated
from ctta.streams.foreign import foreign
from ctta.streams.live import LiveStream, live
from ctta.streams.mixture import mixed
from ctta.streams.orders import corruption_order
from ctta.streams.protocols import PROTOCOLS, ChosenProtocol, parse_protocol
from ctta.streams.recurrence import cdc, cyclic, recurring, rounds
from ctta.streams.sequences import clean, continual, gradual, single
from ctta.streams.sources import acdc, cityscapes, folder, image_folder, in_memory, streets
from ctta.streams.stream import Batch, Segment, Stream
from ctta.streams.video import VideoBatch, VideoStream, video
from ctta.streams.walk import walk

__all__ = [
    "PROTOCOLS",
    "AccuracyMatrix",
    "Batch",
    "ChosenProtocol",
    "Composition",
    "CorruptionSequence",
    "EndlessStream",
    "LiveStream",
    "Segment",
    "Stream",
    "VideoBatch",
    "VideoStream",
    "acdc",
    "ccc",
    "cdc",
    "cityscapes",
    "clean",
    "continual",
    "correlated",
    "corruption_order",
    "cyclic",
    "folder",
    "foreign",
    "gradual",
    "image_folder",
    "in_memory",
    "label_shift",
    "live",
    "long_tail",
    "measure_accuracy",
    "mixed",
    "mixed_correlated",
    "parse_protocol",
    "recurring",
    "rounds",
    "single",
    "streets",
    "video",
    "walk",
]
