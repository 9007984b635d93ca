"""What a table compares methods by."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Measure:
    """A figure between 0 and 1, and which end of it is better."""

    key: str  # as files call it
    name: str  # as a sentence does
    title: str  # as a heading does
    best: Literal["lowest", "highest"]


ERROR = Measure("error", "error", "Error", best="lowest")
MIOU = Measure("miou", "mIoU", "mIoU", best="highest")
