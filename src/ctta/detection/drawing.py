"""Draw boxes on images."""

import numpy as np

from ctta.data.corruptions.arrays import UInt8Array
from ctta.detection.boxes import Boxes

#: One color (red, green, blue) for each class, and again from the first.
COLORS = ((255, 214, 0), (255, 64, 96), (0, 200, 255), (120, 230, 80), (200, 120, 255), (255, 140, 0))


def draw_boxes(image: UInt8Array, found: Boxes, *, min_score: float = 0.3, scale: int = 1) -> UInt8Array:
    """Return an image with frames around boxes, in a color for each class.

    Args:
        image: uint8 (H, W, 3).
        found: Boxes in pixels of the image.
        min_score: Boxes with lower scores are left out.
        scale: How many times as large the result is.

    Returns:
        A new image.
    """
    drawn = image.repeat(scale, 0).repeat(scale, 1)
    height, width = drawn.shape[:2]
    scores = found["scores"].tolist() if "scores" in found else [1.0] * len(found["boxes"])
    for box, score, label in zip(found["boxes"].tolist(), scores, found["labels"].tolist(), strict=True):
        if score < min_score:
            continue
        left, top, right, bottom = (round(scale * side) for side in box)
        left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
        right, bottom = min(max(right, left + 1), width), min(max(bottom, top + 1), height)
        color = np.array(COLORS[label % len(COLORS)], np.uint8)
        for rows, columns in (
            (slice(top, top + 2), slice(left, right)),
            (slice(bottom - 2, bottom), slice(left, right)),
            (slice(top, bottom), slice(left, left + 2)),
            (slice(top, bottom), slice(right - 2, right)),
        ):
            drawn[rows, columns] = color
    return drawn
