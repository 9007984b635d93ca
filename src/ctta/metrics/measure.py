"""What a table compares methods by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A figure between 0 and 1, and which end of it is better."""

    key: str  # as files call it
    name: str  # as a reader does
    lower_is_better: bool

    @property
    def extreme(self) -> str:
        """What the best number of a column is."""
        return "lowest" if self.lower_is_better else "highest"


ERROR = Measure("error", "error", lower_is_better=True)
MIOU = Measure("miou", "mIoU", lower_is_better=False)
