"""Small images and streams that several tests share."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ctta.data.datasets import ArrayDataset
from ctta.data.streams import Batch, Stream, continual

IMAGES = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), np.uint8)
LABELS = np.arange(24) % 4
NAMES = ("contrast", "brightness")
FRAMES = np.random.default_rng(0).integers(0, 256, (7, 4, 6, 3), np.uint8)
FRAMES_AS_FLOATS = torch.from_numpy(FRAMES).permute(0, 3, 1, 2) / 255


def create_data(seed: int = 0) -> ArrayDataset:
    """Return the images as a dataset under every corruption."""
    return ArrayDataset(IMAGES, LABELS, name="noise", seed=seed)


def create_stream(**settings: Any) -> Stream:
    """Return a continual stream of two corruptions with three batches each."""
    defaults: dict[str, Any] = {"names": NAMES, "batch_size": 10}
    return continual(create_data(), **defaults | settings)


def labels_of(batch: Batch) -> Tensor:
    """Return the labels of a batch that has some."""
    assert batch.y is not None
    return batch.y


def is_same_batch(one: Batch, other: Batch) -> bool:
    """Return whether two batches have the same images, labels and domain."""
    return torch.equal(one.x, other.x) and torch.equal(labels_of(one), labels_of(other)) and one.domain == other.domain


def save_image(path: Path, value: int, size: tuple[int, int] = (20, 30), mode: str = "RGB") -> None:
    """Save an image whose red (or gray) values all are ``value``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels: dict[str, Any] = {"RGB": (value, 0, 0), "RGBA": (value, 0, 0, 7), "L": value, "I;16": value * 256}
    Image.new(mode, size, pixels[mode]).save(path)


def write_cifar_batch(path: Path, images: NDArray[np.uint8], labels: list[int], key: bytes = b"labels") -> None:
    """Write a file of the archive of CIFAR-10 or CIFAR-100."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), 3072)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({b"data": planes, key: labels, b"filenames": [b"a.png"] * len(images)}, protocol=2))
