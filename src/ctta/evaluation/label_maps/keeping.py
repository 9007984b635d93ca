"""The label maps that a model answered with, one compressed file per batch in the folder of its evaluation."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.datasets.base import IGNORE_INDEX
from ctta.evaluation.metrics import label_map

FOLDER = "maps"


@dataclass(frozen=True)
class KeptBatch:
    """The answers to one batch, and how good each is."""

    maps: NDArray[np.unsignedinteger]  # (N, H, W); the number of classes stands for an answer that was not finite
    accuracy: NDArray[np.float64]  # (N,), share of right pixels; nan where none is labelled


@torch.no_grad()
def keep_label_maps(folder: Path, number: int, logits: Tensor, labels: Tensor) -> None:
    """Write the answers to a batch, by its number in the stream, at the labels' own resolution."""
    num_classes = logits.shape[1]
    maps = torch.stack([label_map(image, truth.shape) for image, truth in zip(logits, labels, strict=True)]).cpu()
    truths = labels.cpu().long()
    known, right = truths != IGNORE_INDEX, maps == truths
    accuracy = (known & right).sum((1, 2)).double() / known.sum((1, 2))
    (folder / FOLDER).mkdir(exist_ok=True)
    np.savez_compressed(
        _path(folder, number), maps=maps.numpy().astype(np.min_scalar_type(num_classes)), accuracy=accuracy.numpy()
    )


def kept_numbers(folder: Path) -> list[int]:
    """Of the batches that are there."""
    return sorted(int(path.stem) for path in (folder / FOLDER).glob("*.npz"))


def read_label_maps(folder: Path, number: int) -> KeptBatch:
    """What was written of a batch."""
    with np.load(_path(folder, number)) as file:
        return KeptBatch(file["maps"], file["accuracy"])


def read_accuracy(folder: Path, number: int) -> NDArray[np.float64]:
    """The same without unpacking the maps, which takes long where there are thousands of large ones."""
    with np.load(_path(folder, number)) as file:
        accuracy: NDArray[np.float64] = file["accuracy"]
    return accuracy


def _path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{number:06}.npz"
