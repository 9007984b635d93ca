"""Label maps as image files: a class per pixel, with a palette so that viewers show them in color."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctta.errors import ConfigError
from ctta.io.atomic import atomic_write
from ctta.io.images import import_pillow

MAX_CLASSES = 256  # that a palette has


def maps_folder(out: Path) -> Path:
    """Return the folder of the label maps that belong to a table.

    >>> maps_folder(Path("predictions.csv")).name
    'predictions.maps'
    """
    return out.with_suffix(".maps")


def map_path(folder: Path, name: str) -> Path:
    """Return the file for the label map of an image.

    >>> map_path(Path("maps"), "a/1.jpg").as_posix(), map_path(Path("maps"), "a/1.png").as_posix()
    ('maps/a/1.jpg.png', 'maps/a/1.png')
    """
    return folder / (name if name.endswith(".png") else f"{name}.png")


def check_num_classes(num_classes: int) -> None:
    """Raise for a network whose label maps have no palette."""
    if num_classes > MAX_CLASSES:
        raise ConfigError(f"label maps are written for up to {MAX_CLASSES} classes, and the network has {num_classes}")


def write_label_map(path: Path, labels: NDArray[np.int64], classes: Sequence[str] | None, num_classes: int) -> None:
    """Write a label map (H, W) as a PNG whose pixels are the classes."""
    from ctta.benchmark.report.plots import choose_palette  # imports matplotlib

    pillow = import_pillow()
    image = pillow.fromarray(labels.astype(np.uint8))
    image.putpalette(choose_palette(tuple(classes or ()), num_classes).tobytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        image.save(temporary, "PNG")
