"""What a guard reports: the health of a stream, as far as it shows without labels, and events with an audit log."""

import json
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Protocol, Self, runtime_checkable

from ctta.guard.answers import AccuracyTracker
from ctta.io.html import render_facts


@dataclass(frozen=True)
class Health:
    """Signals of one batch, as plain numbers; None where a signal was not computed or does not exist for the method.

    ``source_*`` refers to the network as it was trained, ``anchor_*`` to the same weights under the normalization
    statistics that the method uses, both on this batch; without BatchNorm the two are the same.

    Attributes:
        step: Number of batches before this one.
        confidence: Mean probability of the most probable class.
        entropy: Mean entropy of the predictions, in nats.
        mean_prediction_entropy: Entropy of the mean prediction; low if few classes are predicted.
        source_confidence: The source's ``confidence``.
        source_entropy: The source's ``entropy``.
        source_mean_prediction_entropy: The source's ``mean_prediction_entropy``.
        anchor_confidence: The anchor's ``confidence``.
        anchor_entropy: The anchor's ``entropy``.
        anchor_mean_prediction_entropy: The anchor's ``mean_prediction_entropy``.
        source_disagreement: Fraction of elements whose class differs from the source's.
        anchor_disagreement: Fraction of elements whose class differs from the anchor's.
        student_disagreement: Fraction of elements whose class differs from the student's, where a teacher predicts.
        class_sorting: How much likelier two elements of one batch share a class than two of different batches.
        distance_to_source: Distance of the trained parameters to the source's after the update, relative to the norm
            of the latter.
        update_norm: Norm of the update, relative to the norm of the parameters in the source.
        batch_stats: Fraction of the batch in BatchNorm's statistics; 0 without BatchNorm.
        skipped: Whether the update was skipped because it was not finite; None if there was none.
        adapted: Whether the method adapted to this batch.
        answered_by_source: Whether the source's weights gave the predictions.
        collapse_score: Score of the last inspected batch; an alarm is raised at 1.
        estimated_accuracy: Accuracy of the method over the last inspected batches, estimated without labels; None
            without an estimator, and until a hundred images were inspected.
        estimated_source_accuracy: The same for the source.
        estimated_gain: Their difference.
        estimated_gain_low: Lower end of its 90 % interval.
        estimated_gain_high: Upper end.
    """

    step: int
    confidence: float | None = None
    entropy: float | None = None
    mean_prediction_entropy: float | None = None
    source_confidence: float | None = None
    source_entropy: float | None = None
    source_mean_prediction_entropy: float | None = None
    anchor_confidence: float | None = None
    anchor_entropy: float | None = None
    anchor_mean_prediction_entropy: float | None = None
    source_disagreement: float | None = None
    anchor_disagreement: float | None = None
    student_disagreement: float | None = None
    class_sorting: float | None = None
    distance_to_source: float | None = None
    update_norm: float | None = None
    batch_stats: float | None = None
    skipped: bool | None = None
    adapted: bool = False
    answered_by_source: bool = False
    collapse_score: float = 0.0
    estimated_accuracy: float | None = None
    estimated_source_accuracy: float | None = None
    estimated_gain: float | None = None
    estimated_gain_low: float | None = None
    estimated_gain_high: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the signals for JSON, which has neither NaN nor infinity: both become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the signals that were computed, and whether they raise an alarm."""
        state = "alarm" if self.collapse_score >= 1 else "healthy"
        facts = {name.replace("_", " "): value for name, value in asdict(self).items() if value is not None}
        return render_facts(f"Health: {state}", facts)


class EventKind(StrEnum):
    """Kinds of events; the values are what audit logs contain."""

    COLLAPSE = "collapse"  # detected, and only reported
    RECOVERY = "recovery"  # the stream is no longer sorted by class
    ROLLBACK = "rollback"
    RESET = "reset"
    SOFT_RESET = "soft_reset"
    PERIODIC_RESET = "periodic_reset"
    REMEDY = "remedy"  # one that is not in this list
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    SORTED_STREAM = "sorted_stream"  # batches arrive sorted by class
    REFUSAL = "refusal"  # of a batch that is not valid
    BAD_ROWS = "bad_rows"  # inputs of a batch that were answered by the source
    SKIPPED = "skipped"  # an update with a loss or gradient that is not finite
    SHADOW = "shadow"  # how many predictions would have differed
    HARM = "harm"  # labels show more errors than without adaptation
    LOAD = "load"  # from a file


#: Events after which a method is in another state, so that labels of earlier answers say nothing about later ones.
STATE_CHANGES = frozenset(
    {EventKind.ROLLBACK, EventKind.RESET, EventKind.SOFT_RESET, EventKind.PERIODIC_RESET, EventKind.REMEDY}
)


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        step: Number of batches that the stream had seen.
        kind: What happened.
        cause: Why, in words.
        signals: Health at that moment, as far as it was known.
    """

    step: int
    kind: EventKind
    cause: str
    signals: dict[str, Any]


def append_to_audit_log(path: str, event: Event) -> None:
    """Append a line of JSON with a timestamp to a file."""
    line = json.dumps({"time": datetime.now(UTC).isoformat(), **asdict(event)}, allow_nan=False)
    # Opened for each event, so that logrotate may move the file; logging's WatchedFileHandler, which does the same, is
    # not supported on Windows, and a handler cannot be copied with the model.
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


@runtime_checkable
class Monitored(Protocol):
    """What a service or a command may ask of any model that monitors its own health, as :class:`Guarded` does."""

    audit: str | None
    accuracy: AccuracyTracker
    health: Health
    collapse_score: float
    is_sorted: bool
    events: list[Event]

    def rollback(self) -> Self:
        """Return to the last good snapshot.

        Returns:
            The model itself.
        """
