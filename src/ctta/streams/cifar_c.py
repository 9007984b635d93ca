"""CIFAR-10-C and CIFAR-100-C in their published layout, read from disk as they are needed."""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctta.errors import DataError
from ctta.streams.arrays import PixelArray, content_digest
from ctta.streams.remedies import for_cifar_c
from ctta.validation import check_integer

SEVERITIES = 5


class CifarC:
    """A folder with one ``<corruption>.npy`` (five severities of N images) and ``labels.npy``.

    The arrays are memory-mapped: nothing is read before a batch asks for it, and nothing is copied twice.

    Args:
        folder: as extracted from the published archive, or as ``ctta.corruptions.write_cifar_c`` writes it.
    """

    read_ahead = 0  # mapped files need no decoding

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        labels = np.asarray(self._open("labels"))
        self.count = len(labels) // SEVERITIES if labels.ndim == 1 else 0
        self.labels = labels.reshape(-1)[: self.count]
        repeated = self.count > 0 and np.array_equal(labels, np.tile(self.labels, SEVERITIES))
        if not repeated or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"{self.folder / 'labels.npy'} holds {labels.dtype} {labels.shape}; expected the labels of N images as "
                f"whole numbers, five times over (once per severity): {for_cifar_c(self.folder)}"
            )
        # By content, since folders are called differently on every machine.
        self.name = f"cifar-c[{self.count} images, labels {content_digest(self.labels.astype('<i8'))}]"

    def domain(self, corruption: str, severity: int) -> PixelArray:
        severity = check_integer("severity", severity, 1, SEVERITIES)
        pixels = self._open(corruption)
        expected = SEVERITIES * self.count
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or len(pixels) != expected or pixels.shape[3] != 3:
            raise DataError(
                f"{self.folder / corruption}.npy holds {pixels.dtype} {pixels.shape}; "
                f"expected uint8 ({expected}, H, W, 3): {for_cifar_c(self.folder)}"
            )
        pixels = pixels[self.count * (severity - 1) : self.count * severity]
        # Some rows of each part tell one folder from another, and reading all of it would take minutes.
        sample = pixels[np.linspace(0, self.count - 1, min(self.count, 64)).astype(int)]
        name = f"{self.name} {corruption} {severity} [{content_digest(sample)}]"
        return PixelArray(name, pixels, self.labels)

    def _open(self, stem: str) -> NDArray[Any]:
        path = self.folder / f"{stem}.npy"
        remedy = for_cifar_c(self.folder)
        if not path.is_file():
            there = ", ".join(sorted(other.stem for other in self.folder.glob("*.npy"))) or "no .npy files"
            raise DataError(f"{path} is missing ({self.folder} holds {there}): {remedy}")
        try:
            # By name only once it is known to be an array: numpy would leave a damaged archive open.
            with path.open("rb") as file:
                np.lib.format.read_magic(file)
            opened: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{path} is truncated or not a .npy file ({error}): {remedy}") from error
        return opened
