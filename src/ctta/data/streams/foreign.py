"""Streams with images that do not belong, such as noise: a method sees them, and no score counts them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ctta.core.validation import check_integer
from ctta.data.datasets.base import IGNORE_LABEL, ImageDomain, Rows
from ctta.data.datasets.scenes import StreetScenes
from ctta.data.streams.stream import Mixture, Segment, Stream
from ctta.data.streets import VERSION
from ctta.data.streets.frames import MIN_SIDE
from ctta.errors import ConfigError, DataError

#: Drawn scenes that are shown again when all have been.
NUM_STREETS = 500


@dataclass(frozen=True)
class ForeignImages:
    """Images of something else, of the size of those that they come among, with a label that is not scored."""

    images: ImageDomain | str  # the images; ``"noise"`` for uniform noise, ``"streets"`` for drawn street scenes
    size_of: ImageDomain  # the images that they come among
    num_images: int  # how many there are
    seed: int = 0  # seed of what is drawn

    @property
    def name(self) -> str:
        """Name that identifies the images, the same on every machine."""
        if not isinstance(self.images, str):
            return self.images.name
        version = f" version={VERSION} scenes={NUM_STREETS}" if self.images == "streets" else ""
        return f"foreign {self.images}{version} seed={self.seed}"

    @cached_property
    def labels(self) -> NDArray[np.integer[Any]]:
        """The label that is not scored, for each image."""
        return np.full(self.num_images, IGNORE_LABEL)

    def __len__(self) -> int:
        return self.num_images

    @cached_property
    def _size(self) -> tuple[int, int]:
        height, width = self.size_of.read(np.zeros(1, np.int64))[0].shape[-2:]
        return height, width

    @cached_property
    def _streets(self) -> StreetScenes:
        height, width = (max(side, MIN_SIDE) for side in self._size)
        return StreetScenes("clear", "train", NUM_STREETS, self.seed, (height, width))

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Read or draw some of the images; their labels are not scored."""
        if isinstance(self.images, str) and self.images == "noise":
            drawn = [
                np.random.default_rng([self.seed, row]).integers(0, 256, (3, *self._size), np.uint8) for row in rows
            ]
            x = torch.from_numpy(np.stack(drawn)) / 255
        elif isinstance(self.images, str):
            x = self._streets.read(rows % NUM_STREETS)[0]
        else:
            x = self.images.read(rows % len(self.images))[0]
        if x.shape[-2:] != self._size:
            x = F.interpolate(x, self._size, mode="bilinear", antialias=True).clamp(0, 1)
        return x, torch.full((len(rows),), IGNORE_LABEL)


def foreign(
    stream: Stream, images: Stream | ImageDomain | str = "noise", *, fraction: float = 0.5, seed: int = 0
) -> Stream:
    """Put images that do not belong among those of a stream, evenly spaced.

    A method sees them. They are not scored: error, intervals and tables are about the images of the stream.

    Args:
        stream: A stream with one label per image.
        images: "noise" (uniform), "streets" (drawn street scenes), another stream, or the images of a dataset. They are
            resized to the stream's, and start over when all have been shown.
        fraction: Fraction of foreign images, above 0 and below 1.
        seed: Seed of the noise and of the streets.

    Returns:
        A longer stream.

    Raises:
        ConfigError: A setting has no such value.
        DataError: A segment has no label per image.

    >>> from ctta.data import datasets, streams
    >>> stream = foreign(streams.continual(datasets.sample(), names=("fog",), batch_size=100), fraction=0.2)
    >>> len(stream), int((stream.read_batch(0).y >= 0).sum())
    (25, 80)
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"fraction must be above 0 and below 1, got {fraction!r}")
    seed = check_integer("seed", seed, 0)
    if isinstance(images, str) and images not in ("noise", "streets"):
        raise ConfigError(f"images must be 'noise', 'streets', a stream or the images of a dataset, got {images!r}")
    shown = Mixture(images.segments) if isinstance(images, Stream) else images
    counts = [round(len(segment.rows) * fraction / (1 - fraction)) for segment in stream.segments]
    segments, num_shown = [], 0
    for segment, count in zip(stream.segments, counts, strict=True):
        if segment.images.labels is None:
            raise DataError(f"{segment.domain} has no label per image: foreign images can come among labeled ones only")
        if count == 0:
            segments.append(segment)
            continue
        others = ForeignImages(shown, segment.images, sum(counts), seed)
        mixture = Mixture([segment, Segment("foreign", others, num_shown + np.arange(count))])
        # Images 0, 1, ... and the foreign ones after them, both in their order and evenly spaced.
        places = [(np.arange(number) + 0.5) / number for number in (len(segment.rows), count)]
        rows = np.argsort(np.concatenate(places), kind="stable")
        segments.append(replace(segment, images=mixture, rows=rows))
        num_shown += count
    name = images if isinstance(images, str) else f"[{images.name}]"
    return stream.with_segments(f"foreign {name} fraction={fraction:g} seed={seed}", segments)
