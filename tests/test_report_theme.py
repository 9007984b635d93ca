"""The colors of the figures: contrast with the page, and differences that color-blind readers see."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from report_runs import METHODS

from ctta.benchmark.report.theme import assign_styles

#: Transforms of linear RGB that simulate the absence of one type of cone (Machado et al., 2009).
COLOR_BLINDNESS = {
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def test_styles_differ_and_have_contrast() -> None:
    styles = assign_styles([*METHODS, "CoTTA: weight-avg", "CoTTA: + aug-avg", "mine", "yours"])
    assert len({(style.color, style.dash) for style in styles.values()}) == len(styles)
    assert styles["CoTTA"] == assign_styles(["CoTTA"])["CoTTA"]
    for style in styles.values():
        assert compute_contrast(style.color, "#ffffff") >= 3 and compute_contrast(style.dark_color, "#141416") >= 3


@pytest.mark.parametrize("condition", COLOR_BLINDNESS)
@pytest.mark.parametrize("attribute", ["color", "dark_color"])
def test_colors_differ_for_color_blind_readers(condition: str, attribute: str) -> None:
    styles = assign_styles([*METHODS, "CoTTA: weight-avg", "CoTTA: + aug-avg"])
    colors = [
        to_lab(np.array(COLOR_BLINDNESS[condition]) @ to_linear(getattr(style, attribute))) for style in styles.values()
    ]
    distances = [np.linalg.norm(one - other) for one, other in combinations(colors, 2)]
    assert min(distances) > 8  # a difference of 2 is just noticeable side by side


def to_linear(color: str) -> NDArray[np.float64]:
    """Return the linear RGB values of a hexadecimal sRGB color."""
    channels = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def to_lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return CIE L*a*b* of linear RGB, with white point D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb.clip(0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def compute_contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colors as WCAG defines it."""
    low, high = sorted(float(to_linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (first, second))
    return (high + 0.05) / (low + 0.05)
