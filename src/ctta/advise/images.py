"""The images that a network is judged on: clean ones of the user, what is right for them, and corrupted versions."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from typing_extensions import Doc

from ctta.core.options import Option
from ctta.core.validation import check_choice
from ctta.data.corruptions import corrupt
from ctta.data.corruptions.arrays import images_to_uint8
from ctta.data.datasets import CleanImages, read_clean_images
from ctta.data.datasets.base import CLEAN, PixelArray, describe_arrays
from ctta.data.streams import Segment, Stream, correlated
from ctta.errors import ConfigError, DataError, InputError
from ctta.io.images import to_unit_floats
from ctta.methods import Source
from ctta.nn.surgery import find_weight

#: How the classes of a stream follow each other.
StreamOrder = Literal["shuffled", "correlated", "sorted"]
STREAM_ORDERS: tuple[StreamOrder, ...] = ("shuffled", "correlated", "sorted")
#: One corruption of each kind (noise, blur, weather, light, compression).
DEFAULT_CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog", "contrast", "jpeg_compression")
#: Images that decide whether the network was meant for them; more change little.
MIN_IMAGES = 16

#: What :func:`ctta.advise` takes as images.
ImageSource = str | os.PathLike[str] | NDArray[Any] | Tensor


def gather_images(
    images: ImageSource, labels: ArrayLike | None, *, size: tuple[int, int] | None, limit: int | None, seed: int
) -> CleanImages:
    """Return a user's images as bytes with their labels where they are known; ``limit`` of them, drawn at random.

    They are a folder or file, as for :func:`read_clean_images`, which are resized to ``size``; uint8 (N, H, W, 3); or
    floats (N, 3, H, W) in [0, 1].

    Raises:
        DataError: The path does not exist, or a file is damaged or in another format.
        InputError: An array has another shape, or its values are not in [0, 1].
    """
    if isinstance(images, str | os.PathLike):
        if labels is not None:
            raise ConfigError("labels are given with arrays only: the labels of a folder are its subfolders")
        found = read_clean_images(images, size=size, limit=limit, seed=seed)
    else:
        pixels = images_to_uint8(images)
        targets = None if labels is None else np.asarray(labels)
        describe_arrays("images", pixels, targets)  # raises for other shapes
        rows = np.random.default_rng(seed).permutation(len(pixels))[:limit]
        chosen = None if targets is None else targets[rows].astype(np.int64)
        found = CleanImages(pixels[rows], chosen)
    if len(found.images) < MIN_IMAGES:
        raise InputError(f"got {len(found.images)} images, too few to judge anything by: give some hundred")
    return found


@dataclass(frozen=True)
class LabeledImages:
    """Clean images with what counts as the right answer for each."""

    images: NDArray[np.uint8]  # (N, H, W, 3)
    targets: NDArray[np.int64]  # labels, or the network's answers on the clean images
    has_labels: bool
    num_classes: int
    predicted: NDArray[np.int64]  # the network's answers on the clean images
    confidence: float  # its mean confidence in them
    seed: int  # of the corruptions

    @property
    def clean_error(self) -> float | None:
        """Error of the network on the clean images; None without labels."""
        return float((self.predicted != self.targets).mean()) if self.has_labels else None

    @property
    def reference(self) -> str:
        """What errors are counted against, for people to read."""
        return "labels" if self.has_labels else "the network's own answers on the clean images, as there are no labels"

    def select(self, rows: slice | NDArray[np.int64]) -> "LabeledImages":
        """Return some of the images."""
        return replace(self, images=self.images[rows], targets=self.targets[rows], predicted=self.predicted[rows])


def label_images(
    net: nn.Module, clean: CleanImages, *, use_labels: bool | None = None, batch_size: int = 50, seed: int = 0
) -> LabeledImages:
    """Let a network answer clean images, and decide what counts as right.

    Args:
        net: The network, for images in [0, 1].
        clean: The images.
        use_labels: True requires labels, False ignores them. None uses them if they can be the network's classes:
            subfolders may also be days or cameras, so there must be as many as classes.
        batch_size: Images per pass.
        seed: Seed of the corruptions.

    Returns:
        The images.

    Raises:
        ConfigError: The network does not classify images.
        DataError: There are no labels, or they cannot be the network's classes.
    """
    source = Source(net)
    logits = torch.cat([source(x).float().cpu() for x in iter_batches(net, clean.images, batch_size)])
    if logits.ndim != 2:
        raise ConfigError(
            f"expected logits of shape (N, classes), got {tuple(logits.shape)}: use a network for classification"
        )
    confidences, predicted = logits.softmax(1).max(1)
    labels = select_labels(clean, logits.shape[1], use_labels)
    answers = predicted.numpy()
    return LabeledImages(
        clean.images,
        answers if labels is None else labels,
        labels is not None,
        logits.shape[1],
        answers,
        float(confidences.mean()),
        seed,
    )


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The options for images that a network is judged on."""

    labels: Annotated[
        ArrayLike | None, Doc("Label of each image of an array; the labels of a folder are its subfolders.")
    ] = field(default=None, kw_only=False)
    severity: Annotated[float, Option("Corrupt the images this strongly, above 0 and up to 5.", "N", min=0, max=5)] = (
        3.0
    )
    use_labels: Annotated[
        bool | None,
        Option(
            "Score against the labels of the images. Default: if there are as many subfolders as classes.",
            name="--labels/--no-labels",
        ),
    ] = None
    size: Annotated[
        tuple[int, int] | None,
        Option(
            "Resize image files; the arrays of an .npz file keep their size. Default: their own size.", "HEIGHT WIDTH"
        ),
    ] = None
    check_normalization: Annotated[
        bool,
        Option(
            "Stop if the network clearly expects images in another normalization or size, or continue with any input.",
            name="--check-normalization/--any-input",
        ),
    ] = True
    folder: Annotated[
        str | os.PathLike[str] | None,
        Doc("Where the evaluations are written; called again after an interruption, it resumes from there."),
    ] = None
    on_progress: Annotated[
        Callable[[int, int], None] | None, Doc("Called with how much is done, and how much there is by the estimate.")
    ] = None


def iter_batches(net: nn.Module, images: NDArray[np.uint8], batch_size: int) -> Iterator[Tensor]:
    """Yield uint8 images (N, H, W, 3) as floats (N, 3, H, W) in [0, 1], on the device and in the dtype of a network."""
    weight = find_weight(net)
    for start in range(0, len(images), batch_size):
        yield to_unit_floats(images[start : start + batch_size]).to(weight)


def select_labels(clean: CleanImages, num_classes: int, use_labels: bool | None) -> NDArray[np.int64] | None:
    """Return the labels to score against, by ``use_labels`` of :func:`label_images`, or None to use predictions."""
    labels, num_folders = clean.labels, clean.num_folders
    if use_labels is False:
        return None
    if labels is None:
        if use_labels:
            raise DataError("the images have no labels; expected one subfolder per class, or an .npz with 'labels'")
        return None
    if num_folders is not None and num_folders != num_classes:
        if use_labels:
            raise DataError(f"expected one subfolder per class, got {num_folders} for {num_classes} classes")
        return None
    if not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(
            f"got labels from {labels.min()} to {labels.max()} for a network with {num_classes} classes: check that "
            "the network belongs to these images"
        )
    return labels


class ImageStreams:
    """Streams over images whose corrupted versions are made once and kept in memory."""

    def __init__(self, labeled: LabeledImages) -> None:
        self.labeled = labeled
        self._domains: dict[tuple[str, float], PixelArray] = {}

    def build_stream(
        self,
        steps: Sequence[tuple[str, float]],
        *,
        batch_size: int,
        order: StreamOrder = "shuffled",
        limit: int | None = None,
        visits: int = 1,
        seed: int = 0,
    ) -> Stream:
        """Return the images under one corruption after the other, ``("none", 0)`` for the images as they are.

        Args:
            steps: Corruptions with their severities.
            batch_size: Images per batch.
            order: How the classes follow each other within each corruption: "shuffled"; "correlated", a few classes
                at a time (the sampler of RoTTA with concentration 0.1); or "sorted", class by class.
            limit: Take only the first images.
            visits: How often the corruptions come.
            seed: Seed of the order; 0 keeps that of the images where nothing else is drawn.
        """
        check_choice("order", order, STREAM_ORDERS)
        rows = np.arange(len(self.labeled.images))[:limit]
        rows = np.random.default_rng(seed).permutation(rows) if seed else rows
        segments = [
            Segment(_name_step(step), self._corrupt(step), rows, visit) for visit in range(visits) for step in steps
        ]
        names = ", ".join(_name_step(step) for step in steps)
        name = f"images under {names}" + (f", {visits} visits" if visits > 1 else "")
        stream = Stream(name, segments, batch_size=batch_size)
        if order == "shuffled":
            return stream
        return correlated(stream, sampler="sorted" if order == "sorted" else "rotta", concentration=0.1, seed=seed)

    def _corrupt(self, step: tuple[str, float]) -> PixelArray:
        if step not in self._domains:
            name, severity = step
            pixels, targets = self.labeled.images, self.labeled.targets
            if name != CLEAN:
                pixels = corrupt(pixels, name, severity, seed=self.labeled.seed)
            self._domains[step] = PixelArray(describe_arrays(_name_step(step), pixels, targets), pixels, targets)
        return self._domains[step]


def _name_step(step: tuple[str, float]) -> str:
    name, severity = step
    return "clean" if name == CLEAN else f"{name} {severity:g}"
