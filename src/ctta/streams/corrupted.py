"""Clean images in memory, corrupted on the way by our own generator."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ctta.corruptions import corrupt
from ctta.streams.stream import Rows


def unit_floats(pixels: NDArray[np.uint8]) -> Tensor:
    """Bytes (N, H, W, 3) as floats (N, 3, H, W) in [0, 1]; the memory stays in the order of the bytes."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255)


def content_digest(values: NDArray[Any]) -> str:
    """A short hash of an array's shape and values."""
    digest = hashlib.sha256(f"{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:8]


class Corrupted:
    """A reader that makes its corruptions itself.

    Args:
        images: uint8 (N, H, W, 3).
        labels: N integers.
        name: which images these are; part of the name of every stream over them.
        seed: of the corruptions.
    """

    read_ahead = 0

    def __init__(self, images: NDArray[np.uint8], labels: ArrayLike, *, name: str, seed: int = 0) -> None:
        self.images, self.labels, self.seed = images, np.asarray(labels), seed
        if self.labels.shape != (len(images),) or not np.issubdtype(self.labels.dtype, np.integer):
            raise ValueError(
                f"labels has shape {self.labels.shape} and dtype {self.labels.dtype} for {len(images)} images; "
                "expected one whole number per image"
            )
        self.name = f"{name}[{content_digest(images)} {content_digest(self.labels.astype('<i8'))}] seed={seed}"

    def domain(self, corruption: str, severity: int) -> "CorruptedDomain":
        return CorruptedDomain(self, corruption, severity)


@dataclass(frozen=True)
class CorruptedDomain:
    """The images under one corruption; drawn when read, the same each time."""

    data: Corrupted
    corruption: str
    severity: int

    @property
    def name(self) -> str:
        return f"{self.data.name} {self.corruption} {self.severity}"

    @property
    def labels(self) -> NDArray[np.integer[Any]]:
        return self.data.labels

    def __len__(self) -> int:
        return len(self.data.images)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        pixels = corrupt(self.data.images[rows], self.corruption, self.severity, seed=self.data.seed, index=rows)
        return unit_floats(pixels), torch.from_numpy(self.data.labels[rows].astype(np.int64))
