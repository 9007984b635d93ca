"""Synthetic driving scenes with exact labels, in several weather conditions.

Everything is rendered procedurally and nothing is stored: houses, trees, cars and people are placed in a world measured
in meters, every pixel has a class and a distance, and weather is applied on top.
"""

from ctta.data.streets.canvas import CLASSES, PALETTE
from ctta.data.streets.frames import BOX_CLASSES, CONDITIONS, HOLD_OUT, SPLITS, VERSION, Frame, apply_haze, render_frame

__all__ = [
    "BOX_CLASSES",
    "CLASSES",
    "CONDITIONS",
    "HOLD_OUT",
    "PALETTE",
    "SPLITS",
    "VERSION",
    "Frame",
    "apply_haze",
    "render_frame",
]
