"""From where on a stream counts as sick."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Thresholds:
    """Limits of the signals; each signal divided by its limit is a score, and from 1 on the alarm stands.

    The defaults were fixed by ``benchmarks/choose_guard_thresholds.py``, on other images, corruptions and faults than
    those that are reported.

    Args:
        margin: how often answers may differ from the anchor's (the source's weights under the same normalisation
            statistics), on top of what its own doubt explains. A share of the elements.
        doubt: how much of the anchor's doubt, one minus its confidence, explains.
        class_loss: how much lower the entropy of the mean prediction may be than the anchor's, as a share of it.
        shift: how far disagreement may rise above its own history.
        clumping: how much likelier two elements of one batch may be to share a class than two of different batches,
            in the source's eyes: 0.25 for a quarter likelier. Only asked where batch statistics are used, which such
            batches spoil.
        trust: how much surer of its answers the source may be than the anchor, on average, while batches clump.
        memory: how many elements the recent past is; short for small batches means false alarms.
    """

    margin: float = 0.05
    doubt: float = 1.5
    class_loss: float = 0.1
    shift: float = 0.15
    clumping: float = 0.15
    trust: float = 0.02
    memory: float = 250.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"{field.name} must be a number above 0, got {value!r}")
