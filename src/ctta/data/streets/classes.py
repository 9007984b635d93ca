"""The classes of a street scene, and the colors of label maps."""

import numpy as np
from numpy.typing import NDArray

LabelMap = NDArray[np.uint8]  # (H, W), a class index for every pixel

CLASSES = ("sky", "road", "lane", "pavement", "building", "vegetation", "car", "person", "pole")
SKY, ROAD, LANE, PAVEMENT, BUILDING, VEGETATION, CAR, PERSON, POLE = range(len(CLASSES))

#: One color (red, green, blue) per class, for visualizing label maps.
PALETTE: NDArray[np.uint8] = np.array(
    [
        (112, 168, 220),
        (96, 72, 112),
        (250, 250, 250),
        (226, 120, 200),
        (122, 116, 108),
        (84, 150, 60),
        (20, 40, 170),
        (220, 30, 60),
        (245, 210, 40),
    ],
    np.uint8,
)
