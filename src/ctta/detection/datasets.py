"""Labeled images for detectors, also corrupted: of COCO's format, of YOLO's, and from the maps of Cityscapes."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ctta.data.corruptions import corrupt
from ctta.data.datasets.scenes import LABEL_IDS
from ctta.detection.boxes import Boxes
from ctta.errors import DataError
from ctta.io.images import decoding_errors, import_pillow, is_image_file, to_unit_floats, to_upright_rgb

#: The classes of Cityscapes that have instances, in the order of their ids.
CITYSCAPES_BOX_CLASSES = ("person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle")

#: Images (N, 3, H, W) in [0, 1], the boxes to be found in each, and the name of where they are from.
LabeledBatch = tuple[Tensor, list[Boxes], str]


def read_coco(
    annotations: str | os.PathLike[str], folder: str | os.PathLike[str], classes: Sequence[str] | None = None
) -> Iterator[LabeledBatch]:
    """Read images with the boxes that a file of COCO's format has of them, one after the other.

    Args:
        annotations: The file, such as ``instances_val2017.json``.
        folder: The folder of the images.
        classes: The names of the classes in the order of the detector's labels; others are left out. By default all
            categories in the order of their ids, as YOLO has them.

    Yields:
        An image (1, 3, H, W) in [0, 1], its boxes with those of crowds marked, and the name of its file.

    Raises:
        DataError: The file is not one of COCO's format, has none of the classes, or an image cannot be read.
    """
    path = Path(annotations)
    try:
        content = json.loads(path.read_text())
        names = {entry["id"]: entry["name"] for entry in content["categories"]}
        entries: dict[int, list[tuple[list[float], int, int]]] = {image["id"]: [] for image in content["images"]}
        labels = _number_classes(names, classes, path)
        for each in content["annotations"]:
            if each["category_id"] in labels:
                x, y, width, height = each["bbox"]
                entry = [x, y, x + width, y + height], labels[each["category_id"]], each.get("iscrowd", 0)
                entries[each["image_id"]].append(entry)
        files = [(image["id"], image["file_name"]) for image in content["images"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a file of boxes in COCO's format ({type(error).__name__}: {error})") from error
    for number, name in files:
        found = entries[number]
        boxes, labels_of_image, crowd = zip(*found, strict=True) if found else ((), (), ())
        yield _read_image(Path(folder) / name), [_keep_boxes(boxes, labels_of_image, crowd)], name


def read_yolo(images: str | os.PathLike[str], labels: str | os.PathLike[str]) -> Iterator[LabeledBatch]:
    """Read images with the boxes of text files beside them, as YOLO is trained with, one after the other.

    Each line of a file is a class, and the center, width and height of a box as fractions of the image.

    Args:
        images: The folder of the images.
        labels: The folder of the text files, named like the images; an image without one has no boxes.

    Yields:
        An image (1, 3, H, W) in [0, 1], its boxes, and the name of its file; by name.

    Raises:
        DataError: There are no images or no text files, or one of them cannot be read.
    """
    paths = sorted(path for path in Path(images).glob("*") if is_image_file(path, Path(images)))
    files = {path.stem: path for path in Path(labels).glob("*.txt")}
    if not any(path.stem in files for path in paths):
        raise DataError(f"{labels} has no text file for one of the {len(paths)} images in {images}")
    for path in paths:
        image, found = _read_image(path), []
        try:
            for line in files[path.stem].read_text().splitlines() if path.stem in files else ():
                label, x, y, width, height = line.split()
                found.append((int(label), float(x), float(y), float(width), float(height)))
        except ValueError as error:
            raise DataError(f"{files[path.stem]} is no file of classes and boxes: {error}") from error
        rows = torch.tensor([row[1:] for row in found], dtype=torch.float64).view(-1, 4)
        center, extent = rows.split(2, 1)
        corners = torch.cat([center - extent / 2, center + extent / 2], 1)
        boxes = corners * torch.tensor([image.shape[3], image.shape[2]] * 2)
        yield image, [_keep_boxes(boxes.tolist(), [row[0] for row in found])], path.name


def read_cityscapes(
    folder: str | os.PathLike[str],
    split: str = "val",
    min_pixels: int = 100,
    *,
    classes: Sequence[str] = CITYSCAPES_BOX_CLASSES,
    size: tuple[int, int] | None = None,
) -> Iterator[LabeledBatch]:
    """Read the images of Cityscapes with boxes around the instances of its maps, one after the other.

    Objects that the maps do not tell apart are within a box that is marked as a crowd.

    Args:
        folder: What holds ``leftImg8bit`` and ``gtFine``, whose maps are named ``..._gtFine_instanceIds.png``.
        split: "train" or "val".
        min_pixels: Leave out instances of which fewer pixels are visible.
        classes: The names of the classes in the order of the detector's labels, such as those of COCO; others are left
            out. A rider counts as a person if there are no riders among them.
        size: Height and width to resize the images to; None to leave them as they are.

    Yields:
        An image (1, 3, H, W) in [0, 1], its boxes with indices into ``classes``, and the city.

    Raises:
        DataError: There are no such maps, or an image cannot be read.
    """
    root, order = Path(folder), list(classes)
    names = {name: "person" if name == "rider" and name not in order else name for name in CITYSCAPES_BOX_CLASSES}
    numbers = {LABEL_IDS[name]: order.index(known) for name, known in names.items() if known in order}
    maps = sorted((root / "gtFine" / split).glob("*/*_gtFine_instanceIds.png"))
    if not maps:
        raise DataError(
            f"no file *_gtFine_instanceIds.png below {root / 'gtFine' / split}: give the root of Cityscapes"
        )
    for path in maps:
        instances = _read_pixels(path, as_rgb=False)
        boxes, labels, crowd = [], [], []
        for number in np.unique(instances).tolist():  # class times 1000, plus the number of the instance; or the class
            rows, columns = (instances == number).nonzero()
            label = numbers.get(number // 1000 or number)
            if label is not None and len(rows) >= min_pixels:
                boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                labels.append(label)
                crowd.append(number < 1000)
        name = path.name.removesuffix("_gtFine_instanceIds.png")
        image = _read_image(root / "leftImg8bit" / split / path.parent.name / f"{name}_leftImg8bit.png")
        if size is not None:
            image = F.interpolate(image, size, mode="bilinear", align_corners=False, antialias=True)
        height, width = instances.shape
        scale = torch.tensor([image.shape[3] / width, image.shape[2] / height]).repeat(2)
        target = _keep_boxes(boxes, labels, crowd)
        yield image, [target | {"boxes": target["boxes"] * scale}], path.parent.name


def find_labeled_images(
    path: str | os.PathLike[str],
    classes: Sequence[str] | None = None,
    *,
    size: tuple[int, int] | None = None,
    limit: int | None = None,
) -> Callable[[], Iterator[LabeledBatch]]:
    """Return a function that reads labeled images in the layout of their authors.

    Args:
        path: The root of Cityscapes; or a file such as ``annotations/instances_val2017.json`` of COCO's format, with
            the images in the folder ``val2017`` beside ``annotations``; or a folder of images such as
            ``images/val2017``, with YOLO's text files in ``labels/val2017``.
        classes: The names of the detector's classes in the order of its labels, for the first two.
        size: Height and width to resize images of Cityscapes to.
        limit: How many images to read at most.

    Returns:
        The function, for :func:`corrupt_stream`.

    Raises:
        DataError: The path has none of these layouts.
    """
    root = Path(path)
    if (root / "gtFine").is_dir():
        read = partial(read_cityscapes, root, classes=classes or CITYSCAPES_BOX_CLASSES, size=size)
    elif root.suffix == ".json" and root.is_file():
        folder = root.parent.parent / root.stem.removeprefix("instances_")
        read = partial(read_coco, root, folder, classes)
    elif root.is_dir() and "images" in root.parts:
        at = len(root.parts) - 1 - root.parts[::-1].index("images")
        read = partial(read_yolo, root, Path(*root.parts[:at], "labels", *root.parts[at + 1 :]))
    else:
        raise DataError(
            f"{path} is neither the root of Cityscapes, nor a file such as annotations/instances_val2017.json, nor "
            "a folder of images such as images/val2017 with text files in labels/val2017"
        )
    return lambda: islice(read(), limit)


def corrupt_stream(
    read: Callable[[], Iterable[LabeledBatch]],
    corruptions: Sequence[str],
    *,
    severity: float = 5,
    rounds: int = 1,
    seed: int = 0,
) -> Iterator[LabeledBatch]:
    """Read labeled images once for each corruption, one corruption after the other; boxes stay where they are.

    Args:
        read: Returns the images; it is called once for each corruption of each round.
        corruptions: Names of :data:`ctta.data.corruptions.CORRUPTIONS` or ``HOLD_OUT``, and "clean" for the images as
            they are.
        severity: How strong the corruptions are, from 1 to 5.
        rounds: How often the corruptions follow each other. An image is corrupted in the same way in each.
        seed: Seed of the corruptions.

    Yields:
        The images of a batch, their boxes, and the corruption, before it the number of the round if there are several.
    """
    for number in range(rounds):
        for name in corruptions:
            count = 0
            for x, targets, _ in read():
                if name != "clean":
                    x = corrupt(x, name, severity, seed=seed, index=range(count, count + len(x)))
                count += len(x)
                yield x, targets, name if rounds == 1 else f"{number + 1} {name}"


def _number_classes(names: Mapping[int, str], classes: Sequence[str] | None, path: Path) -> dict[int, int]:
    order = [names[number] for number in sorted(names)] if classes is None else list(classes)
    labels = {number: order.index(name) for number, name in names.items() if name in order}
    if not labels:
        raise DataError(f"{path} has none of the classes {', '.join(order)}; it has {', '.join(names.values())}")
    return labels


def _keep_boxes(boxes: Sequence[Sequence[float]], labels: Sequence[int], crowd: Sequence[int] | None = None) -> Boxes:
    """Return boxes that have an area, and which of them are crowds if that is known."""
    corners = torch.tensor(np.array(boxes, np.float32)).view(-1, 4)
    is_box = (corners[:, 2:] > corners[:, :2]).all(1)
    found = Boxes(boxes=corners[is_box], labels=torch.tensor(labels, dtype=torch.long)[is_box])
    if crowd is not None:
        found["crowd"] = torch.tensor(crowd, dtype=torch.bool)[is_box]
    return found


def _read_pixels(path: Path, *, as_rgb: bool) -> NDArray[Any]:
    try:
        with import_pillow().open(path) as image:
            return np.array(to_upright_rgb(image, path.name) if as_rgb else image)
    except decoding_errors() as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_image(path: Path) -> Tensor:
    return to_unit_floats(_read_pixels(path, as_rgb=True)[None]).contiguous()
