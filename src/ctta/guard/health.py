"""Health of a stream, as far as it shows without labels."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from ctta.core.model import AdaptiveModel
from ctta.functional import at_least_float32
from ctta.guard.events import Event
from ctta.io.html import render_facts

NUM_BINS = 64  # more classes share bins, so that histories have a fixed size


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
        """Return the signals for JSON, which has neither NaN nor infinity: both become None.

        Returns:
            The fields by name.
        """
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the signals that were computed, and whether they raise an alarm."""
        state = "alarm" if self.collapse_score >= 1 else "healthy"
        facts = {name.replace("_", " "): value for name, value in asdict(self).items() if value is not None}
        return render_facts(f"Health: {state}", facts)


@runtime_checkable
class Monitored(Protocol):
    """What a service or a command may ask of any model that monitors its own health.

    Attributes:
        audit: File that events are written to, or None.
    """

    audit: str | None

    @property
    def health(self) -> Health:
        """Signals of the last batch."""

    @property
    def collapse_score(self) -> float:
        """Score of the last inspected batch; an alarm is raised at 1."""

    @property
    def is_sorted(self) -> bool:
        """Whether batches arrive sorted by class, so that the source answers as it was trained."""

    @property
    def events(self) -> list[Event]:
        """The last events, oldest first."""

    def rollback(self) -> Self:
        """Return to the last good snapshot.

        Returns:
            The model itself.
        """


@dataclass(frozen=True)
class PredictionSummary:
    """Statistics of one network's predictions on a batch."""

    confidence: float
    entropy: float
    mean_prediction_entropy: float
    mean_prediction: Tensor  # in NUM_BINS bins
    agreement_within: float | None  # probability that two elements share a class; None for a single one
    num_bins: int  # that classes fall into, at most NUM_BINS
    classes: Tensor
    confidences: Tensor  # of each element
    is_finite: bool


@torch.no_grad()
def summarize(logits: Tensor) -> PredictionSummary:
    """Summarize logits of shape (N, C, ...)."""
    logs = at_least_float32(logits).log_softmax(1)
    probabilities = logs.exp()
    mean = probabilities.transpose(0, 1).flatten(1).mean(1, dtype=torch.float64)
    flat = _bin_classes(probabilities.transpose(0, 1).flatten(1))  # (bins, elements)
    count = flat.shape[1]
    total = flat.sum(1, dtype=torch.float64)
    own = (flat * flat).sum(dtype=torch.float64)
    confidences = probabilities.amax(1)
    values = torch.stack(
        [
            confidences.mean(dtype=torch.float64),
            -(probabilities * logs.clamp_min(-1e4)).sum(1).mean(dtype=torch.float64),
            -(mean * mean.clamp_min(1e-30).log()).sum(),
            (total.square().sum() - own) / max(count * (count - 1), 1),
        ]
    ).tolist()
    confidence, entropy, mean_entropy, within = values
    return PredictionSummary(
        confidence=confidence,
        entropy=entropy,
        mean_prediction_entropy=mean_entropy,
        mean_prediction=total / count,
        agreement_within=within if count > 1 else None,
        num_bins=min(logits.shape[1], NUM_BINS),
        classes=logits.argmax(1),
        confidences=confidences,
        is_finite=all(map(math.isfinite, values)),
    )


def _bin_classes(by_class: Tensor) -> Tensor:
    bins = torch.arange(len(by_class), device=by_class.device) % NUM_BINS
    return by_class.new_zeros(NUM_BINS, by_class.shape[1]).index_add_(0, bins, by_class)


def disagreement(one: PredictionSummary, other: PredictionSummary) -> float:
    """Return the fraction of elements for which two networks predict different classes."""
    return float((one.classes != other.classes).double().mean())


def trained_pairs(model: AdaptiveModel) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters that a method trains, each with the source's parameter of the same name."""
    return [(parameter, model.source.get_parameter(name)) for name, parameter in _trained_parameters(model)]


def _trained_parameters(model: AdaptiveModel) -> Iterator[tuple[str, nn.Parameter]]:
    for network in model.children():
        if network is not model.source:
            names = {name for name, _ in model.source.named_parameters()}
            for name, parameter in network.named_parameters():
                if parameter.requires_grad and name in names:
                    yield name, parameter


@torch.no_grad()
def relative_norm(differences: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """Return the norm of all differences together, relative to that of the reference."""
    norm, scale = (nn.utils.get_total_norm(list(tensors)) for tensors in (differences, reference))
    return float(norm) / max(float(scale), 1e-12)
