"""What a guard does about a verdict: remedies, pauses, and the source's answers while a stream is sorted."""

from typing import Self

from ctta.core.model import AdaptiveModel
from ctta.guard.detector import HEALTHY_SCORE, CollapseDetector
from ctta.guard.diagnostics import Diagnostics
from ctta.guard.event_log import GuardEvents
from ctta.guard.events import EventKind
from ctta.guard.remedies import REMEDIES, Remedy, take_snapshot
from ctta.guard.schedule import FEW_CLASSES, NOT_SORTED, SORTED, Schedule


class GuardRemedies(GuardEvents):
    """The part of a guard that acts on verdicts, and returns the method to an earlier state."""

    wrapped: AdaptiveModel
    good: AdaptiveModel  # the last good snapshot; shares the source with the wrapped model and the guard
    detector: CollapseDetector
    schedule: Schedule
    on_collapse: Remedy | None

    @property
    def is_sorted(self) -> bool:
        """Whether batches arrive sorted by class, so that the source answers as it was trained."""
        return bool(self.schedule.is_sorted) and self.on_collapse is not None

    def _is_sorted(self, diagnostics: Diagnostics) -> bool:
        """Return whether the stream counts as sorted: from a score of 1 on, until it is healthy again."""
        if diagnostics.verdict is None:
            return self.schedule.is_sorted
        return diagnostics.verdict.sorting >= (HEALTHY_SCORE if self.schedule.is_sorted else 1)

    def _apply_verdict(self, diagnostics: Diagnostics) -> None:
        if diagnostics.references.few_classes < 1 and not self.schedule.is_sorted:
            self.detector.remember_confidence_(diagnostics.predictions)
        if diagnostics.verdict is None:
            return
        is_sorted = self._is_sorted(diagnostics)
        has_few_classes = diagnostics.references.few_classes >= 1
        self.detector.remember_(diagnostics.verdict)
        if is_sorted or self.schedule.is_sorted:
            self._set_sorted(is_sorted)
        elif has_few_classes and self.schedule.sorting != FEW_CLASSES:  # reported once, as the next may have few too
            self.record(EventKind.SORTED_STREAM, "the batch has few classes")
        elif not has_few_classes:
            self._set_collapsed(diagnostics.verdict.collapse, diagnostics.verdict.cause)
        if not is_sorted:
            self.schedule.sorting = FEW_CLASSES if has_few_classes else NOT_SORTED

    def _set_sorted(self, is_sorted: bool) -> None:
        if is_sorted == self.schedule.is_sorted:
            return
        self.schedule.sorting = SORTED if is_sorted else NOT_SORTED
        if not is_sorted:
            self.record(EventKind.RECOVERY, "batches are no longer sorted by class")
        elif self.on_collapse is None:
            self.record(EventKind.SORTED_STREAM, "batches are sorted by class")
        else:
            self._apply_remedy("rollback", "batches are sorted by class", EventKind.SORTED_STREAM)

    def _set_collapsed(self, score: float, cause: str) -> None:
        was_collapsed, self.schedule.is_collapsed = self.schedule.is_collapsed, int(score >= 1)
        if score < 1:
            return
        cause = f"collapse score {score:.2f}: {cause}"
        if self.on_collapse is None:
            if not was_collapsed:
                self.record(EventKind.COLLAPSE, cause)
            return
        if self.schedule.num_cooldown:  # nothing was adapted since the last alarm, so its remedy did not help
            self._apply_remedy("reset", f"{cause}, also after the last remedy")
        else:
            self._apply_remedy(self.on_collapse, cause)
        self.schedule.count_alarm_()

    def _apply_remedy(self, remedy: Remedy, cause: str, kind: EventKind | None = None) -> None:
        self.wrapped = REMEDIES[remedy](self.wrapped, self.good)
        if remedy == "reset":
            self.good = take_snapshot(self.wrapped)
        if remedy == "freeze":
            self.frozen = True
        self.detector.forget_predictions_()
        self.record(kind or EventKind(remedy), cause)

    def rollback(self) -> Self:
        """Return to the last good snapshot, which is the source until there is one.

        Returns:
            The model itself.
        """
        self._apply_remedy("rollback", "requested")
        return self
