"""Protocols that readers implement: the images of one domain, and a dataset under several corruptions."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctta.errors import DataError

#: Indices of images within a domain.
Rows = NDArray[np.int64]
#: Label of pixels that are not scored, as in Cityscapes and ACDC.
IGNORE_INDEX = 255
#: Label of images that are not scored; a class cannot have it, and torch's cross-entropy ignores it too.
IGNORE_LABEL = -100


class Images(Protocol):
    """The images of one domain."""

    @property
    def name(self) -> str:
        """Name that identifies the images by content, the same on every machine; enters the hash of a stream."""

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        """Label of each image, known without reading the images; None if there are none, or one per pixel."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Read some of the images.

        Args:
            rows: Indices of the images.

        Returns:
            Images of shape (N, C, H, W) as floats in [0, 1], and their labels, if there are any.
        """


@runtime_checkable
class HasOrigins(Protocol):
    """Images of several domains, each of which knows where it comes from."""

    def origins(self, rows: Rows) -> tuple[tuple[str, ...], Rows]:
        """Return the domain of each image and its index within that domain."""


@runtime_checkable
class HasClassNames(Protocol):
    """Images whose dataset names its classes, in the order of the labels."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels."""


class CorruptionDataset(Protocol):
    """A dataset that exists under several corruptions and severities, such as CIFAR-10-C."""

    @property
    def name(self) -> str:
        """Name of the dataset, part of the name of every stream over it."""

    @property
    def read_ahead(self) -> int:
        """Number of batches worth reading in the background."""

    def domain(self, corruption: str, severity: float) -> Images:
        """Return the images under one corruption.

        Args:
            corruption: Name of the corruption.
            severity: 1 (weak) to 5 (strong); datasets that corrupt their images take any number from 0 to 5.

        Returns:
            The images of that domain.
        """


def no_clean_images(folder: Path, stream: str) -> DataError:
    """Return the error for a dataset of corrupted images that is asked for the images as they are.

    Args:
        folder: The folder of the dataset.
        stream: The call that opens clean images.
    """
    return DataError(f"{folder} holds corrupted images only: give a stream of the clean ones, such as {stream}")
