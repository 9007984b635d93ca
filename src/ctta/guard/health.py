"""What a guard reports: the health of a stream, as far as it shows without labels, and events with an audit log."""

import json
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from html import escape
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
        collapse_score: Score of the last inspected batch, from 0 to 10: healthy below 0.5, an alarm from 1 on.
        estimated_gain: Accuracy above the source's, estimated without labels; None until enough images were inspected.
        estimated_gain_low: Lower end of its interval, which covered the gain in 90 % of the measured runs.
        estimated_gain_high: Upper end; where zero is between the two, it cannot be told whether adaptation helps.
        estimated_images: Inspected images that the estimate was made from.
        estimated_since: Step of the first of them; the estimate stands for all images from there on.
        state_since: Step at which the stream became healthy, or ceased to be.
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
    estimated_gain: float | None = None
    estimated_gain_low: float | None = None
    estimated_gain_high: float | None = None
    estimated_images: int | None = None
    estimated_since: int | None = None
    state_since: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the signals for JSON, which has neither NaN nor infinity: both become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @property
    def is_healthy(self) -> bool:
        """Whether the method answers, and raises no alarm."""
        return self.collapse_score < 1 and not self.answered_by_source

    def __str__(self) -> str:
        """Return five lines for people: state, gain, what changed, what was done, and the score on its scale."""
        state = "healthy" if self.is_healthy else "not healthy"
        reason = ": the network as trained answers" if self.answered_by_source else ""
        return "\n".join(
            [
                f"{state} since step {self.state_since}{reason}",
                self._describe_gain(),
                self._describe_answers(),
                self._describe_update(),
                f"collapse score {self.collapse_score:.2f}, from 0 to 10: healthy below 0.5, an alarm from 1 on",
            ]
        )

    def _describe_gain(self) -> str:
        gain, low, high = self.estimated_gain, self.estimated_gain_low, self.estimated_gain_high
        if gain is None or low is None or high is None:
            return "gain over the network as trained: not known before 64 images were inspected"
        told = f"{100 * gain:+.1f} points" if low > 0 or high < 0 else "cannot be told"
        seen = f"from {self.estimated_images} images since step {self.estimated_since}"
        return f"gain over the network as trained: {told} ({100 * low:+.0f} to {100 * high:+.0f}), estimated {seen}"

    def _describe_answers(self) -> str:
        confidence = "unknown" if self.confidence is None else f"{self.confidence:.2f}"
        if self.source_confidence is None or self.source_disagreement is None:
            return f"confidence {confidence}"
        differing = f"{100 * self.source_disagreement:.0f} % of the answers to this batch differ"
        return f"confidence {confidence}, as trained {self.source_confidence:.2f}; {differing}"

    def _describe_update(self) -> str:
        if self.skipped:
            return "the update was skipped, as it was not finite"
        if self.distance_to_source is None:
            return "adapted to this batch" if self.adapted else "not adapted to this batch"
        verb = "adapted" if self.adapted else "not adapted"
        return f"{verb} to this batch; trained weights are {100 * self.distance_to_source:.2g} % from those as trained"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the lines for people, and the signals that were computed."""
        facts = {name.replace("_", " "): value for name, value in asdict(self).items() if value is not None}
        state = "healthy" if self.is_healthy else "alarm" if self.collapse_score >= 1 else "answered by the source"
        lines = "".join(f"<p>{escape(line)}</p>" for line in str(self).splitlines())
        return lines + render_facts(f"Health: {state}", facts)


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
    HARM = "harm"  # labels, or the estimate without labels, show more errors than without adaptation
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
