"""ACDC and Cityscapes: pictures at any size, label maps at their own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.datasets.arrays import hash_array
from ctta.datasets.base import IGNORE_INDEX, Rows
from ctta.datasets.image_files import Resize, describe_files, read_images
from ctta.errors import DataError
from ctta.io.images import decoding_errors, import_pillow, is_image_file

#: Of the trainIds, in order.
CLASS_NAMES = (
    "road",
    "sidewalk",
    "building",
    "wall",
    "fence",
    "pole",
    "traffic light",
    "traffic sign",
    "vegetation",
    "terrain",
    "sky",
    "person",
    "rider",
    "car",
    "truck",
    "bus",
    "train",
    "motorcycle",
    "bicycle",
)
NUM_CLASSES = len(CLASS_NAMES)
CONDITIONS = ("fog", "night", "rain", "snow")
LAST_LABEL_ID = 33
MOST_DISTORTED = 1.1  # width to height of a picture, beside that of its label map
#: The labelId of each trainId, 0 (road) to 18 (bicycle).
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
TRAIN_ID_OF = np.full(256, IGNORE_INDEX, np.int64)
TRAIN_ID_OF[list(LABEL_IDS)] = np.arange(NUM_CLASSES)


@dataclass(frozen=True)
class LabeledScenes:
    """Pictures with a map of trainIds, or of labelIds to make them from; ``labels`` is None: no scene has one label."""

    name: str
    pictures: tuple[Path, ...]
    maps: tuple[Path, ...]
    size: tuple[int, int] | None

    labels = None
    class_names = CLASS_NAMES

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        x = read_images([self.pictures[row] for row in rows], Resize(self.size) if self.size else None)
        maps = [torch.from_numpy(read_label_map(self.maps[row])) for row in rows]
        if len({values.shape for values in maps}) > 1:
            raise DataError(f"{self.maps[rows[0]]} and others of its batch differ in size: use batch_size=1")
        for row, values in zip(rows, maps, strict=True):
            check_same_shape(self.pictures[row], self.maps[row], values.shape)
        return x, torch.stack(maps)


def check_same_shape(picture: Path, label_map: Path, size: torch.Size) -> None:
    """Refuse a map of another scene: pictures are resized, so nothing else would notice.

    Some store pictures smaller than their maps, and round the shorter side, so the shape may differ a little.
    """
    with import_pillow().open(picture) as file:  # reads no more than the file's head
        width, height = file.size
    if not 1 / MOST_DISTORTED < (width / height) / (size[1] / size[0]) < MOST_DISTORTED:
        raise DataError(
            f"{picture} has {height}x{width} pixels and its labels {label_map} {size[0]}x{size[1]}, which is another "
            "shape: give each picture the map of the same scene, uncropped"
        )


def read_label_map(path: Path) -> NDArray[np.int64]:
    """The trainIds in a file, made from labelIds if it holds those."""
    try:
        with import_pillow().open(path) as file:
            values: NDArray[Any] = np.asarray(file)
    except decoding_errors() as error:
        raise DataError(f"{path} is missing or truncated ({error}): extract the archive of labels again") from error
    if values.ndim != 2 or values.dtype.kind not in "ui":
        raise DataError(
            f"{path} holds {values.dtype} values of shape {values.shape}, and not one whole number per pixel: use the "
            "maps of labels, not those of colours, and store them without alpha"
        )
    kind, last = ("labelIds", LAST_LABEL_ID) if path.name.endswith("_labelIds.png") else ("trainIds", NUM_CLASSES - 1)
    if ((values < 0) | ((values > last) & (values != IGNORE_INDEX))).any():
        raise DataError(
            f"{path} holds other values than {kind} 0 to {last} and 255: extract the archive of labels again"
        )
    return TRAIN_ID_OF[values] if kind == "labelIds" else values.astype(np.int64)


def find_scenes(
    pictures: Path, ending: str, maps: Path, map_ending: str, size: tuple[int, int] | None
) -> LabeledScenes:
    found = sorted(path for path in pictures.rglob(f"*{ending}") if is_image_file(path, pictures))
    if not found:
        raise DataError(f"{pictures} holds no *{ending}: extract the archive of pictures there, or check the path")
    partners = []
    for path in found:
        stem = maps / path.relative_to(pictures).with_name(path.name.removesuffix(ending) + map_ending)
        # The download of Cityscapes holds labelIds; trainIds are made from them by a script that not everybody ran.
        candidates = [stem.with_name(f"{stem.name}{kind}.png") for kind in ("labelTrainIds", "labelIds")]
        partners.append(next((map_path for map_path in candidates if map_path.is_file()), candidates[0]))
    if missing := [path for path in partners if not path.is_file()]:
        more = f", and so for {len(missing) - 1} more pictures" if len(missing) > 1 else ""
        raise DataError(
            f"{missing[0]} is missing, as is its *_labelIds.png{more}: extract the archive of labels into {maps}"
        )
    # By what the first map says, not by its file: trainIds made from labelIds score the same.
    name = f"{describe_files(pictures, found, str(size))} maps[{hash_array(read_label_map(partners[0]).astype('<i8'))}]"
    return LabeledScenes(name, tuple(found), tuple(partners), size)
