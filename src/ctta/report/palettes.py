"""A colour for every class of a label map."""

import colorsys

import numpy as np
from numpy.typing import NDArray

from ctta import synthetic
from ctta.datasets.segmentation import CLASS_NAMES

#: Cityscapes' own colours, which readers of its papers know by heart.
_CITYSCAPES = (
    (128, 64, 128),
    (244, 35, 232),
    (70, 70, 70),
    (102, 102, 156),
    (190, 153, 153),
    (153, 153, 153),
    (250, 170, 30),
    (220, 220, 0),
    (107, 142, 35),
    (152, 251, 152),
    (70, 130, 180),
    (220, 20, 60),
    (255, 0, 0),
    (0, 0, 142),
    (0, 0, 70),
    (0, 60, 100),
    (0, 80, 100),
    (0, 0, 230),
    (119, 11, 32),
)
_GOLDEN = 0.618034  # of a turn: neighbours in number are far apart in hue


def palette_of(class_names: tuple[str, ...], num_classes: int) -> NDArray[np.uint8]:
    """(num_classes, 3): the data set's own colours where it has some, else colours told apart by their hue."""
    if class_names == synthetic.CLASSES:
        return synthetic.PALETTE
    if class_names == CLASS_NAMES:
        return np.array(_CITYSCAPES, np.uint8)
    colours = [
        colorsys.hsv_to_rgb(number * _GOLDEN % 1, 0.85 - 0.3 * (number % 2), 0.9 - 0.3 * (number % 3 == 2))
        for number in range(num_classes)
    ]
    return (255 * np.array(colours)).astype(np.uint8)
