"""Labeled images for detectors: COCO's annotations, and the instance maps of Cityscapes."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctta.data.datasets.scenes import LABEL_IDS
from ctta.detection.boxes import Boxes
from ctta.errors import DataError
from ctta.io.images import decoding_errors, import_pillow, to_unit_floats, to_upright_rgb

#: The classes of Cityscapes that have instances, in the order of their ids.
CITYSCAPES_BOX_CLASSES = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")


def read_coco(
    annotations: str | os.PathLike[str], folder: str | os.PathLike[str], classes: Sequence[str] | None = None
) -> Iterator[tuple[Tensor, list[Boxes], str]]:
    """Read images with the boxes that a file of COCO's format has of them, one after the other.

    Args:
        annotations: The file, such as ``instances_val2017.json``.
        folder: The folder of the images.
        classes: The names of the classes in the order of the detector's labels; others are left out. By default all
            categories in the order of their ids, as YOLO has them.

    Yields:
        An image (1, 3, H, W) in [0, 1], its boxes without those of crowds, and the name of its file.

    Raises:
        DataError: The file is not one of COCO's format, has none of the classes, or an image cannot be read.
    """
    path = Path(annotations)
    try:
        content = json.loads(path.read_text())
        names = {entry["id"]: entry["name"] for entry in content["categories"]}
        entries: dict[int, list[tuple[list[float], int]]] = {image["id"]: [] for image in content["images"]}
        labels = _number_classes(names, classes, path)
        for each in content["annotations"]:
            if not each.get("iscrowd", 0) and each["category_id"] in labels:
                x, y, width, height = each["bbox"]
                entries[each["image_id"]].append(([x, y, x + width, y + height], labels[each["category_id"]]))
        files = [(image["id"], image["file_name"]) for image in content["images"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a file of boxes in COCO's format ({type(error).__name__}: {error})") from error
    for number, name in files:
        found = entries[number]
        boxes = torch.tensor([box for box, _ in found]).view(-1, 4)
        yield _read_image(Path(folder) / name), [_keep_boxes(boxes, [label for _, label in found])], name


def read_cityscapes(
    folder: str | os.PathLike[str], split: str = "val", min_pixels: int = 100
) -> Iterator[tuple[Tensor, list[Boxes], str]]:
    """Read the images of Cityscapes with boxes around the instances of its maps, one after the other.

    Args:
        folder: What holds ``leftImg8bit`` and ``gtFine``, whose maps are named ``..._gtFine_instanceIds.png``.
        split: "train" or "val".
        min_pixels: Leave out instances of which fewer pixels are visible.

    Yields:
        An image (1, 3, H, W) in [0, 1], its boxes with indices into ``CITYSCAPES_BOX_CLASSES``, and the city.

    Raises:
        DataError: There are no such maps, or an image cannot be read.
    """
    root, ids = Path(folder), [LABEL_IDS[name] for name in CITYSCAPES_BOX_CLASSES]
    maps = sorted((root / "gtFine" / split).glob("*/*_gtFine_instanceIds.png"))
    if not maps:
        raise DataError(
            f"no file *_gtFine_instanceIds.png below {root / 'gtFine' / split}: give the root of Cityscapes"
        )
    for path in maps:
        instances = _read_pixels(path, as_rgb=False)
        boxes, labels = [], []
        for number in np.unique(instances[instances >= 1000]):  # class times 1000, plus the number of the instance
            rows, columns = (instances == number).nonzero()
            if number // 1000 in ids and len(rows) >= min_pixels:
                boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                labels.append(ids.index(int(number) // 1000))
        name = path.name.removesuffix("_gtFine_instanceIds.png")
        image_path = root / "leftImg8bit" / split / path.parent.name / f"{name}_leftImg8bit.png"
        found = torch.tensor(np.array(boxes, np.float32)).view(-1, 4)
        yield _read_image(image_path), [_keep_boxes(found, labels)], path.parent.name


def _number_classes(names: Mapping[int, str], classes: Sequence[str] | None, path: Path) -> dict[int, int]:
    order = [names[number] for number in sorted(names)] if classes is None else list(classes)
    labels = {number: order.index(name) for number, name in names.items() if name in order}
    if not labels:
        raise DataError(f"{path} has none of the classes {', '.join(order)}; it has {', '.join(names.values())}")
    return labels


def _keep_boxes(boxes: Tensor, labels: Sequence[int]) -> Boxes:
    """Return boxes that have an area."""
    is_box = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return Boxes(boxes=boxes[is_box].float(), labels=torch.tensor(labels, dtype=torch.long)[is_box])


def _read_pixels(path: Path, *, as_rgb: bool) -> NDArray[Any]:
    try:
        with import_pillow().open(path) as image:
            return np.array(to_upright_rgb(image, path.name) if as_rgb else image)
    except decoding_errors() as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_image(path: Path) -> Tensor:
    return to_unit_floats(_read_pixels(path, as_rgb=True)[None]).contiguous()
