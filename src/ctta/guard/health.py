"""Signs of a stream's health that need no labels."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.functional import at_least_float32
from ctta.guard.events import Event

NUM_BINS = 64  # more classes than this share bins, so that a history has a size whatever the network


@dataclass(frozen=True)
class Health:
    """What one batch showed; None where it was not looked at or the method has no such thing. Plain numbers.

    ``source_*`` is said of the network as it was trained, ``anchor_*`` of the same weights under the normalisation
    statistics that the method uses, on this same batch; without BatchNorm the two are one.
    """

    step: int
    confidence: float | None = None  # mean probability of the most probable class
    entropy: float | None = None  # mean, in nats
    mean_prediction_entropy: float | None = None  # of the mean prediction: low where all is taken for a few classes
    source_confidence: float | None = None
    source_entropy: float | None = None
    source_mean_prediction_entropy: float | None = None
    anchor_confidence: float | None = None
    anchor_entropy: float | None = None
    anchor_mean_prediction_entropy: float | None = None
    source_disagreement: float | None = None  # share of elements with another class
    anchor_disagreement: float | None = None
    student_disagreement: float | None = None  # of a student with the answer, where a teacher gives it
    clumping: float | None = None  # how much likelier two of one batch share a class than two of different batches
    distance_to_source: float | None = None  # of what is trained, relative to the source's norm; after the update
    update_norm: float | None = None  # of the optimiser's step, relative to the source's norm
    skipped: bool | None = None  # the update was not finite; None if none was tried
    adapted: bool = False  # whether the method was let learn from this batch
    answered_by_source: bool = False
    collapse_score: float = 0.0  # from 1 on the alarm stands

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows neither NaN nor infinity: both become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@runtime_checkable
class Monitored(Protocol):
    """A model that watches its own health; what a service or a command may ask of any such model.

    Attributes:
        health: Signals of the last batch.
        collapse_score: From 1 on, the model has collapsed.
        events: What happened lately, oldest first.
        audit: File that events are written to, or None.
    """

    audit: str | None

    @property
    def health(self) -> Health: ...

    @property
    def collapse_score(self) -> float: ...

    @property
    def events(self) -> list[Event]: ...

    def rollback(self) -> Self:
        """Return to the last good snapshot."""
        ...


@dataclass(frozen=True)
class Answers:
    """What is asked of one network's logits on a batch."""

    confidence: float
    entropy: float
    mean_prediction_entropy: float
    mean_prediction: Tensor  # in NUM_BINS bins
    agreement_within: float | None  # how probable it is that two elements share a class; None for a single one
    classes: Tensor
    is_finite: bool


@torch.no_grad()
def summarise(logits: Tensor) -> Answers:
    """One pass over logits (N, C, ...)."""
    logs = at_least_float32(logits).log_softmax(1)
    probabilities = logs.exp()
    mean = probabilities.transpose(0, 1).flatten(1).mean(1, dtype=torch.float64)
    flat = _binned(probabilities.transpose(0, 1).flatten(1))  # (bins, elements)
    count = flat.shape[1]
    total = flat.sum(1, dtype=torch.float64)
    own = (flat * flat).sum(dtype=torch.float64)
    figures = torch.stack(
        [
            probabilities.amax(1).mean(dtype=torch.float64),
            -(probabilities * logs.clamp_min(-1e4)).sum(1).mean(dtype=torch.float64),
            -(mean * mean.clamp_min(1e-30).log()).sum(),
            (total.square().sum() - own) / max(count * (count - 1), 1),
        ]
    ).tolist()
    confidence, entropy, mean_entropy, within = figures
    return Answers(
        confidence=confidence,
        entropy=entropy,
        mean_prediction_entropy=mean_entropy,
        mean_prediction=total / count,
        agreement_within=within if count > 1 else None,
        classes=logits.argmax(1),
        is_finite=all(map(math.isfinite, figures)),
    )


def _binned(by_class: Tensor) -> Tensor:
    bins = torch.arange(len(by_class), device=by_class.device) % NUM_BINS
    return by_class.new_zeros(NUM_BINS, by_class.shape[1]).index_add_(0, bins, by_class)


def disagreement(one: Answers, other: Answers) -> float:
    """The share of elements to which two networks give different classes."""
    return float((one.classes != other.classes).double().mean())


def trained_pairs(model: AdaptiveModel) -> list[tuple[Tensor, Tensor]]:
    """What a method trains, each with the source's tensor of the same name."""
    return [(parameter, model.source.get_parameter(name)) for name, parameter in _trained(model)]


def _trained(model: AdaptiveModel) -> Iterator[tuple[str, nn.Parameter]]:
    for network in model.children():
        if network is not model.source:
            names = {name for name, _ in model.source.named_parameters()}
            for name, parameter in network.named_parameters():
                if parameter.requires_grad and name in names:
                    yield name, parameter


@torch.no_grad()
def relative_norm(differences: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """The norm of all differences laid end to end, relative to that of the reference."""
    norm, scale = (nn.utils.get_total_norm(list(tensors)) for tensors in (differences, reference))
    return float(norm) / max(float(scale), 1e-12)
