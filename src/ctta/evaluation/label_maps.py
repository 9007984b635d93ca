"""Predicted label maps on disk, and the example scenes that adaptation changed most, for better and for worse."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ctta.data.datasets import IGNORE_INDEX
from ctta.data.streams import Stream
from ctta.evaluation.metrics import predict_label_map
from ctta.io.atomic import atomic_write

MAPS = "maps"


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
def save_label_maps(
    folder: Path, index: int, logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX
) -> None:
    """Save the predictions (N, C, h, w) of a batch at the resolution of its labels (N, H, W)."""
    num_classes = logits.shape[1]
    maps = torch.stack(
        [predict_label_map(image, truth.shape) for image, truth in zip(logits, labels, strict=True)]
    ).cpu()
    truths = labels.cpu().long()
    known, correct = truths != ignore_index, maps == truths
    accuracy = (known & correct).sum((1, 2)).double() / known.sum((1, 2))
    (folder / MAPS).mkdir(exist_ok=True)
    np.savez_compressed(
        _path(folder, index), maps=maps.numpy().astype(np.min_scalar_type(num_classes)), accuracy=accuracy.numpy()
    )


def saved_batches(folder: Path) -> list[int]:
    """Return the indices of the batches with saved label maps, sorted."""
    return sorted(int(path.stem) for path in (folder / MAPS).glob("*.npz"))


def load_label_maps(folder: Path, index: int) -> SavedLabelMaps:
    """Load the label maps of a batch, with their accuracy."""
    with np.load(_path(folder, index)) as file:
        return SavedLabelMaps(file["maps"], file["accuracy"])


def load_accuracy(folder: Path, index: int) -> NDArray[np.float64]:
    """Load the accuracy of a batch without decompressing its maps, which is slow for thousands of large ones."""
    with np.load(_path(folder, index)) as file:
        accuracy: NDArray[np.float64] = file["accuracy"]
    return accuracy


def _path(folder: Path, index: int) -> Path:
    return folder / MAPS / f"{index:06}.npz"


EXAMPLES = "examples"  # in a run folder
MAX_WIDTH = 384  # pixels: enough to see details, and a page with many examples stays small

LabelMap = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class SceneExample:
    """A scene that adaptation changed: its image, labels, and predictions of the source network and of the model."""

    method: str
    kind: str  # "best" or "worst": the change of the method
    stream_hash: str
    domain: str
    segment: int
    class_names: tuple[str, ...]  # empty if unknown
    accuracy_before: float  # fraction of labeled pixels that the source network predicts correctly
    accuracy_after: float
    image: NDArray[np.uint8]  # (H, W, 3)
    truth: LabelMap  # (H, W), like the predictions
    before: LabelMap
    after: LabelMap


def save_examples(method: str, adapted: Path, source: Path, stream: Stream, out: Path) -> None:
    """Save the scenes where a method improved and worsened the source network's predictions most.

    ``adapted`` and ``source`` are the folders of both evaluations on the stream. Scenes are compared by pixel accuracy,
    which is what one can see: the mIoU of a single scene jumps with a class that covers a handful of pixels. Nothing is
    saved where no scene got better, or worse.
    """
    changes = {}
    for index in sorted({*saved_batches(adapted)} & {*saved_batches(source)}):
        for row, change in enumerate(load_accuracy(adapted, index) - load_accuracy(source, index)):
            if np.isfinite(change):
                changes[index, row] = float(change)
    for kind, pick, sign in (("best", max, 1), ("worst", min, -1)):
        scene = pick(changes, key=lambda scene: changes[scene], default=None)
        if scene is not None and sign * changes[scene] > 0:
            out.mkdir(exist_ok=True)
            example = _build_example(method, kind, adapted, source, stream, *scene)
            save_example(example, out / f"{adapted.name}-{kind}.npz")


def save_example(example: SceneExample, path: Path) -> None:
    """Save an example as one compressed ``.npz`` file."""
    fields: dict[str, Any] = {name: np.asarray(value) for name, value in vars(example).items()}
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **fields)  # before 2.1, NumPy takes every other keyword for an array


def load_examples(run: Path) -> list[SceneExample]:
    """Load the examples of a run folder, sorted by file name: of each method the best change before the worst."""
    return [_load_example(path) for path in sorted((run / EXAMPLES).glob("*.npz"))]


def _load_example(path: Path) -> SceneExample:
    with np.load(path) as file:
        fields = {name: value if value.ndim > 1 else value.tolist() for name, value in file.items()}
    return SceneExample(**fields | {"class_names": tuple(fields["class_names"])})


def _build_example(
    method: str, kind: str, adapted: Path, source: Path, stream: Stream, index: int, row: int
) -> SceneExample:
    """Return the example of one scene of a batch, shrunk to the maximum width."""
    batch, segment = stream.read_batch(index), stream.segment_index(index)
    assert batch.y is not None
    before, after = load_label_maps(source, index), load_label_maps(adapted, index)
    height, width = batch.y.shape[1:]
    scale = min(1.0, MAX_WIDTH / width)
    size = (round(height * scale), round(width * scale))
    return SceneExample(
        method=method,
        kind=kind,
        stream_hash=stream.hash,
        domain=batch.domain,
        segment=segment,
        class_names=stream.class_names,
        accuracy_before=float(before.accuracy[row]),
        accuracy_after=float(after.accuracy[row]),
        image=_resize_image(batch.x[row], size),
        truth=_resize_nearest(batch.y[row].numpy(), size).astype(np.uint8),
        before=_resize_nearest(before.maps[row], size),
        after=_resize_nearest(after.maps[row], size),
    )


def _resize_image(image: Tensor, size: tuple[int, int]) -> NDArray[np.uint8]:
    resized = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    pixels: NDArray[np.uint8] = (resized.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return pixels


def _resize_nearest(classes: LabelMap, size: tuple[int, int]) -> LabelMap:
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(size, classes.shape, strict=True)
    )
    return classes[np.ix_(rows, columns)]
