"""Predicted label maps on disk: one compressed file per batch in the folder of an evaluation."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.data.datasets import IGNORE_INDEX
from ctta.evaluation.metrics import predict_label_map

FOLDER = "maps"


@dataclass(frozen=True)
class SavedLabelMaps:
    """The predictions of one batch.

    Attributes:
        maps: (N, H, W) classes; the number of classes stands for a prediction that was not finite.
        accuracy: (N,) fraction of labeled pixels that are correct; nan where none is labeled.
    """

    maps: NDArray[np.unsignedinteger]
    accuracy: NDArray[np.float64]


@torch.no_grad()
def save_label_maps(folder: Path, index: int, logits: Tensor, labels: Tensor) -> None:
    """Save the predictions of a batch at the resolution of its labels.

    Args:
        folder: Folder of the evaluation.
        index: Index of the batch in the stream.
        logits: (N, C, h, w).
        labels: (N, H, W) integers.
    """
    num_classes = logits.shape[1]
    maps = torch.stack(
        [predict_label_map(image, truth.shape) for image, truth in zip(logits, labels, strict=True)]
    ).cpu()
    truths = labels.cpu().long()
    known, correct = truths != IGNORE_INDEX, maps == truths
    accuracy = (known & correct).sum((1, 2)).double() / known.sum((1, 2))
    (folder / FOLDER).mkdir(exist_ok=True)
    np.savez_compressed(
        _path(folder, index), maps=maps.numpy().astype(np.min_scalar_type(num_classes)), accuracy=accuracy.numpy()
    )


def saved_batches(folder: Path) -> list[int]:
    """Return the indices of the batches with saved label maps.

    Args:
        folder: Folder of an evaluation.

    Returns:
        The indices in the stream, sorted.
    """
    return sorted(int(path.stem) for path in (folder / FOLDER).glob("*.npz"))


def load_label_maps(folder: Path, index: int) -> SavedLabelMaps:
    """Load the predictions of a batch.

    Args:
        folder: Folder of the evaluation.
        index: Index of the batch in the stream.

    Returns:
        The label maps and their accuracy.
    """
    with np.load(_path(folder, index)) as file:
        return SavedLabelMaps(file["maps"], file["accuracy"])


def load_accuracy(folder: Path, index: int) -> NDArray[np.float64]:
    """Load the accuracy of a batch without decompressing its maps, which is slow for thousands of large ones.

    Args:
        folder: Folder of the evaluation.
        index: Index of the batch in the stream.

    Returns:
        (N,) fraction of labeled pixels that are correct.
    """
    with np.load(_path(folder, index)) as file:
        accuracy: NDArray[np.float64] = file["accuracy"]
    return accuracy


def _path(folder: Path, index: int) -> Path:
    return folder / FOLDER / f"{index:06}.npz"
