"""Streams: the protocols in which the domains of a dataset arrive.

A stream yields :class:`Batch` after :class:`Batch`. It has a length, a position that can be saved and restored, the
names of its domains, and a hash: results are comparable if their hashes agree. :func:`live`, which reads a running
camera, has no length and no hash, and :func:`ccc` has no length unless it is given one.
"""

from ctta.data.streams.accuracy import AccuracyMatrix, measure_accuracy
from ctta.data.streams.ccc import EndlessStream, ccc, walk
from ctta.data.streams.correlation import correlated, label_shift, long_tail, mixed_correlated
from ctta.data.streams.factories import acdc, cityscapes, folder, image_folder, in_memory, streets
from ctta.data.streams.foreign import foreign
from ctta.data.streams.protocols import PROTOCOLS, ChosenProtocol, CorruptionSequence, parse_protocol
from ctta.data.streams.recurrence import cdc, cyclic, recurring, rounds
from ctta.data.streams.sequences import clean, continual, corruption_order, gradual, single
from ctta.data.streams.stream import Batch, Composition, Segment, Stream, mixed
from ctta.data.streams.video import LiveStream, VideoBatch, VideoStream, live, video

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
