"""Scenes with a label per pixel: ACDC and Cityscapes from files, and drawn streets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.core.validation import check_integer
from ctta.data.corruptions.arrays import UInt8Array
from ctta.data.datasets.base import IGNORE_INDEX, Rows, hash_array
from ctta.data.datasets.image_files import describe_files, read_images
from ctta.data.streets.canvas import CLASSES, LabelMap
from ctta.data.streets.frames import VERSION, check_condition, render_frame, validate_size
from ctta.errors import DataError
from ctta.io.images import Resize, decoding_errors, import_pillow, is_image_file, to_unit_floats

#: The labelId of each of the 19 classes of Cityscapes, in the order of their trainIds.
LABEL_IDS = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
CLASS_NAMES = tuple(LABEL_IDS)
NUM_CLASSES = len(CLASS_NAMES)
CONDITIONS = ("fog", "night", "rain", "snow")
MAX_ASPECT_CHANGE = 1.1  # of an image relative to its label map
TRAIN_ID_OF = np.full(256, IGNORE_INDEX, np.int64)
TRAIN_ID_OF[list(LABEL_IDS.values())] = np.arange(NUM_CLASSES)


@dataclass(frozen=True)
class LabeledScenes:
    """Scenes of one domain with a map of trainIds each, or of labelIds from which these are derived.

    Attributes:
        name: Identifies the scenes, see :func:`find_scenes`.
        images: Files of the images.
        maps: Files of the label maps.
        size: (height, width) to resize images to, or None; label maps keep their size.
    """

    name: str
    images: tuple[Path, ...]
    maps: tuple[Path, ...]
    size: tuple[int, int] | None

    labels = None  # labels are per pixel
    class_names = CLASS_NAMES

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Decode some of the scenes.

        Args:
            rows: Indices of the scenes.

        Returns:
            Images of shape (N, 3, H, W) as floats in [0, 1], and label maps of shape (N, H', W').

        Raises:
            DataError: A file is missing or damaged, the sizes differ, or a map does not belong to its image.
        """
        x = read_images([self.images[row] for row in rows], Resize(self.size) if self.size else None)
        maps = [torch.from_numpy(read_label_map(self.maps[row])) for row in rows]
        if len({values.shape for values in maps}) > 1:
            raise DataError(
                f"label maps in a batch must have the same size, but {self.maps[rows[0]]} and others differ: "
                "use batch_size=1"
            )
        for row, values in zip(rows, maps, strict=True):
            check_aspect_ratio(self.images[row], self.maps[row], values.shape)
        return x, torch.stack(maps)


def check_aspect_ratio(image: Path, label_map: Path, map_size: torch.Size) -> None:
    """Refuse a label map of another scene: as images are resized, nothing else would notice.

    Some people store images smaller than their maps and round the shorter side, so the ratio may differ slightly.
    """
    with import_pillow().open(image) as file:  # reads only the header
        width, height = file.size
    if not 1 / MAX_ASPECT_CHANGE < (width / height) / (map_size[1] / map_size[0]) < MAX_ASPECT_CHANGE:
        raise DataError(
            f"{image} has {height}x{width} pixels, but its label map {label_map} has {map_size[0]}x{map_size[1]}, "
            "which is another aspect ratio: use the uncropped label map of the same scene"
        )


def read_label_map(path: Path) -> NDArray[np.int64]:
    """Return the trainIds in a file, 255 where a pixel is not scored; labelIds (``*_labelIds.png``) are converted."""
    try:
        with import_pillow().open(path) as file:
            values: NDArray[Any] = np.asarray(file)
    except decoding_errors() as error:
        raise DataError(f"{path} is missing or truncated ({error}): extract the archive of labels again") from error
    if values.ndim != 2 or values.dtype.kind not in "ui":
        raise DataError(
            f"{path} must contain one integer per pixel, got {values.dtype} of shape {values.shape}: use the label "
            "maps, not the color maps, and store them without alpha"
        )
    is_label_ids = path.name.endswith("_labelIds.png")
    kind, largest = ("labelIds", max(LABEL_IDS.values())) if is_label_ids else ("trainIds", NUM_CLASSES - 1)
    if ((values < 0) | ((values > largest) & (values != IGNORE_INDEX))).any():
        raise DataError(
            f"{path} must contain only the {kind} 0 to {largest} and 255, but has other values: extract the archive of "
            "labels again"
        )
    return TRAIN_ID_OF[values] if is_label_ids else values.astype(np.int64)


def find_scenes(
    images: Path, image_ending: str, maps: Path, map_ending: str, size: tuple[int, int] | None
) -> LabeledScenes:
    """Return the scenes of a folder and below, sorted by path, each with its label map; raise if one has none.

    The maps lie in the same subfolders of ``maps``. Their names have ``map_ending`` + ``labelTrainIds.png`` in place
    of ``image_ending``.
    """
    found = sorted(path for path in images.rglob(f"*{image_ending}") if is_image_file(path, images))
    if not found:
        raise DataError(f"{images} contains no *{image_ending}: check the path, or extract the archive of images there")
    partners = []
    for path in found:
        stem = maps / path.relative_to(images).with_name(path.name.removesuffix(image_ending) + map_ending)
        # Cityscapes is published with labelIds; a script that not everybody runs derives trainIds from them.
        candidates = [stem.with_name(f"{stem.name}{kind}.png") for kind in ("labelTrainIds", "labelIds")]
        partners.append(next((map_path for map_path in candidates if map_path.is_file()), candidates[0]))
    if missing := [path for path in partners if not path.is_file()]:
        more = f", as for {len(missing) - 1} more images" if len(missing) > 1 else ""
        raise DataError(
            f"{missing[0]} is missing, and so is its *_labelIds.png{more}: extract the archive of labels into {maps}"
        )
    # By the content of the first map, not by its file: trainIds that were derived from labelIds score the same.
    content = hash_array(read_label_map(partners[0]).astype("<i8"))
    name = f"{describe_files(images, found, str(size))} maps[{content}]"
    return LabeledScenes(name, tuple(found), tuple(partners), size)


#: Pixels that a reader caches (64 MiB, 512 frames of 128x256), as repeated rounds show the same scenes again.
MAX_CACHED_PIXELS = 1 << 24


@dataclass(frozen=True)
class StreetScenes:
    """Scenes 0, 1, 2, … of the synthetic street under one condition.

    Attributes:
        condition: Weather or light, as for :func:`ctta.data.streets.render_frame`.
        split: "train", "choose" or "report"; each has other scenes.
        num_scenes: Number of scenes.
        seed: Seed of the street.
        size: (height, width) in pixels.

    >>> scenes = StreetScenes("fog", num_scenes=10)
    >>> x, y = scenes.read(np.array([0, 7]))
    >>> x.shape, y.shape, y.dtype
    (torch.Size([2, 3, 128, 256]), torch.Size([2, 128, 256]), torch.int64)
    """

    condition: str
    split: str = "report"
    num_scenes: int = 100
    seed: int = 0
    size: tuple[int, int] = (128, 256)
    _cache: dict[int, tuple[UInt8Array, LabelMap]] = field(default_factory=dict, init=False, repr=False, compare=False)

    labels = None  # labels are per pixel
    class_names = CLASSES

    def __post_init__(self) -> None:
        check_condition(self.condition, self.split)
        check_integer("seed", self.seed)
        check_integer("num_scenes", self.num_scenes, 1)
        validate_size(self.size)

    @property
    def name(self) -> str:
        """Name that identifies the scenes, the same on every machine."""
        # With the version of the generator: another version may draw other pixels, whose results are not comparable.
        height, width = self.size
        return f"streets={VERSION} {self.split} seed={self.seed} size={height}x{width} {self.condition}"

    def __len__(self) -> int:
        return self.num_scenes

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Render some of the scenes.

        Args:
            rows: Indices of the scenes.

        Returns:
            Images of shape (N, 3, H, W) as floats in [0, 1], and label maps of shape (N, H, W).
        """
        images, labels = zip(*(self._render(int(row)) for row in rows), strict=True)
        return to_unit_floats(np.stack(images)), torch.from_numpy(np.stack(labels).astype(np.int64))

    def _render(self, row: int) -> tuple[UInt8Array, LabelMap]:
        if row in self._cache:
            return self._cache[row]
        frame = render_frame(row, self.condition, split=self.split, seed=self.seed, size=self.size)
        if len(self._cache) < MAX_CACHED_PIXELS // frame.label.size:
            self._cache[row] = frame.image, frame.label
        return frame.image, frame.label
