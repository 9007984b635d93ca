"""What is done to a method when something is wrong with it."""

import os
from typing import Literal, Self

from ctta.base import AdaptiveModel
from ctta.guard.around import AroundMethod
from ctta.guard.detector import Detector
from ctta.guard.remedies import REMEDIES, snapshot
from ctta.guard.schedule import Schedule

OnCollapse = Literal["rollback", "reset", "soft_reset", "freeze"]


class RemediedMethod(AroundMethod):
    """Acts on what a detector says, and has the method rest thereafter.

    Args:
        model: the method.
        audit: where events are written.
        on_collapse: the remedy, or None to only report.
        detector: is made to forget what weights that are gone have said.
        schedule: is told of alarms.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        audit: str | os.PathLike[str] | None,
        on_collapse: OnCollapse | None,
        detector: Detector,
        schedule: Schedule,
    ) -> None:
        super().__init__(model, audit)
        self.on_collapse, self.detector, self.schedule = on_collapse, detector, schedule

    def set_clumped(self, clumped: bool) -> None:
        """Batches come class by class, or no longer do."""
        if clumped == bool(self.schedule["clumped"]):
            return
        self.schedule["clumped"] = int(clumped)
        if clumped and self.on_collapse is not None:
            self.remedy("rollback", "batches come class by class", "clumping")
        else:
            self.note(*("clumping", "batches come class by class") if clumped else ("recovery", "no clumps any more"))

    def set_collapsed(self, score: float, cause: str) -> None:
        """Answers were looked at; from a score of 1 on they have collapsed."""
        was, self.schedule["alarmed"] = self.schedule["alarmed"], int(score >= 1)
        if score < 1:
            return
        cause = f"collapse score {score:.2f}: {cause}"
        if self.on_collapse is None:
            if not was:
                self.note("collapse", cause)
            return
        if self.schedule["resting"]:  # nothing was learnt since the last alarm, so what it went back to is no good
            self.remedy("reset", f"{cause}, also after the last remedy")
        else:
            self.remedy(self.on_collapse, cause)
        self.schedule.after_alarm()

    def remedy(self, kind: str, cause: str, event: str | None = None) -> None:
        """Do one of :data:`~ctta.guard.remedies.REMEDIES` to the method, and put that on record."""
        self.wrapped = REMEDIES[kind](self.wrapped, self.good)
        if kind == "reset":
            self.good = snapshot(self.wrapped)
        if kind == "freeze":
            self.frozen = True
        self.detector.forget_recent()
        self.note(event or kind, cause)

    def rollback(self) -> Self:
        """Go back to the last good snapshot, which is the source as long as there was none."""
        self.remedy("rollback", "asked for")
        return self
