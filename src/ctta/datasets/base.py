"""What a reader offers: images of one domain, or a data set in several domains."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]
#: Label of pixels that are not scored, as in Cityscapes and ACDC.
IGNORE_INDEX = 255


class Images(Protocol):
    """The images of one domain, as a reader offers them."""

    @property
    def name(self) -> str:
        """Which images these are, the same on every machine."""

    @property
    def labels(self) -> NDArray[np.integer[Any]] | None:
        """The label of each image, without reading the images; None where there are none."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Images (N, C, H, W) as floats in [0, 1], and their labels."""


@runtime_checkable
class HasOrigins(Protocol):
    """Images of several domains put together, which know where each comes from."""

    def origins(self, rows: Rows) -> tuple[tuple[str, ...], Rows]: ...


@runtime_checkable
class HasClassNames(Protocol):
    """Images whose data set has names for its classes, in the order of the labels."""

    @property
    def class_names(self) -> tuple[str, ...]: ...


class CorruptionDataset(Protocol):
    """A data set that exists under several corruptions and severities, as a reader offers it."""

    @property
    def name(self) -> str: ...

    @property
    def read_ahead(self) -> int:
        """How many batches are worth reading in the background."""

    def domain(self, corruption: str, severity: int) -> Images: ...
