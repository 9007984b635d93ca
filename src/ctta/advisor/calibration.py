"""Fit the estimate of accuracy without labels to corrupted images with known answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from ctta.advisor.candidates import Candidate
from ctta.advisor.pictures import CorruptedPictures, ImageSource, Pictures, gather_images, label_pictures
from ctta.corruptions import HOLD_OUT
from ctta.datasets.corruptible import CLEAN
from ctta.guard.estimate import NUM_SIGNALS, GainEstimator, measure, to_signals
from ctta.guard.health import summarize
from ctta.methods import Source

SEVERITIES = (1.0, 3.0, 5.0)
RIDGE = 0.1
COVERAGE = 0.9


@dataclass(frozen=True)
class DomainSignals:
    """What shows of a domain without labels, and the truth.

    Attributes:
        domain: Name of the corruption, for leaving it out.
        signals: Those of the adapted network.
        source_signals: Those of the network without adaptation.
        accuracy: That of the adapted network.
        source_accuracy: That of the network without adaptation.
        num_images: Number of images.
    """

    domain: str
    signals: tuple[float, ...]
    source_signals: tuple[float, ...]
    accuracy: float
    source_accuracy: float
    num_images: int


def calibrate_gain(
    net: nn.Module,
    images: ImageSource,
    labels: ArrayLike | None = None,
    *,
    method: str,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    severities: Sequence[float] = SEVERITIES,
    limit: int | None = 200,
    seed: int = 0,
) -> GainEstimator:
    """Calibrate the estimate of accuracy without labels for a network and a method.

    The method adapts to clean images and to the four hold-out corruptions at several severities. Weights are fitted by
    ridge regression; the half-widths of the 90 % intervals are quantiles of the errors on corruptions that were left
    out of the fit.

    Args:
        net: The network, for images in [0, 1].
        images: Clean images, as for :func:`ctta.advise`.
        labels: As for :func:`ctta.advise`. Without labels, the network's answers on the clean images count as right,
            and the estimates are about these.
        method: Name of the method.
        settings: Its settings, with the values of ``--set``.
        batch_size: Images per step.
        severities: Severities of the corruptions.
        limit: Number of images; None for all.
        seed: Seed of the draws.

    Returns:
        The estimator, for ``ctta.Guarded(model, estimator=...)``.
    """
    pictures = label_pictures(net, gather_images(images, labels, size=None, limit=limit, seed=seed), seed=seed)
    return fit_estimator(
        collect_signals(net, pictures, Candidate(method, dict(settings or {})), severities, batch_size)
    )


def collect_signals(
    net: nn.Module,
    pictures: Pictures,
    candidate: Candidate,
    severities: Sequence[float],
    batch_size: int,
    on_domain: Callable[[int, int], None] | None = None,
) -> list[DomainSignals]:
    """Let a method adapt to pictures under the hold-out corruptions, and record signals and truth of each domain.

    Args:
        net: The network.
        pictures: Clean pictures.
        candidate: The method.
        severities: Severities of the corruptions.
        batch_size: Images per step.
        on_domain: Called after each domain with the number of domains that are done and that there are.

    Returns:
        One entry per domain.
    """
    steps = [(CLEAN, 0.0), *((name, severity) for severity in severities for name in HOLD_OUT)]
    stream = CorruptedPictures(pictures).build_stream(steps, batch_size=batch_size)
    return record_signals(candidate.build(net), Source(net), stream, [name for name, _ in steps], on_domain)


def record_signals(
    model: nn.Module,
    source: nn.Module,
    stream: Any,
    names: Sequence[str],
    on_domain: Callable[[int, int], None] | None = None,
) -> list[DomainSignals]:
    """Send a stream through a model and its source, and record signals and truth of each segment.

    Args:
        model: The model, which adapts.
        source: The network without adaptation, returning logits.
        stream: A stream with labels.
        names: Name of the corruption of each segment.
        on_domain: As for :func:`collect_signals`.

    Returns:
        One entry per segment.
    """
    reference = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    found: list[DomainSignals] = []
    values: list[tuple[float, ...]] = []
    counts: list[tuple[int, int, int]] = []
    for index, batch in enumerate(stream):
        x = batch.x.to(reference)
        plain, adapted = summarize(source(x)), summarize(model(x))
        values.append(measure(adapted, plain))
        right = [int((each.classes.cpu() == batch.y).sum()) for each in (adapted, plain)]
        counts.append((right[0], right[1], len(x)))
        segment = stream.segment_index(index)
        if index + 1 == len(stream) or stream.segment_index(index + 1) != segment:
            found.append(_summarize(names[segment], values, counts))
            values, counts = [], []
            if on_domain:
                on_domain(len(found), len(names))
    return found


def fit_estimator(domains: Sequence[DomainSignals]) -> GainEstimator:
    """Fit weights to domains, and the half-widths by leaving out one corruption at a time.

    Args:
        domains: Signals and truth.

    Returns:
        The estimator.
    """
    errors: list[tuple[float, float, float]] = []
    for name in dict.fromkeys(each.domain for each in domains if each.domain != CLEAN):
        estimator = _fit([each for each in domains if each.domain != name], (0.0, 0.0, 0.0))
        for each in (each for each in domains if each.domain == name):
            found = estimator.estimate(each.signals, each.source_signals)
            gain = each.accuracy - each.source_accuracy
            errors.append(
                (
                    abs(found.accuracy - each.accuracy),
                    abs(found.source_accuracy - each.source_accuracy),
                    abs(found.gain - gain),
                )
            )
    widths = [_quantile([error[place] for error in errors]) for place in range(3)]
    return _fit(domains, (widths[0], widths[1], widths[2]))


def _fit(domains: Sequence[DomainSignals], widths: tuple[float, float, float]) -> GainEstimator:
    adapted = _regress([each.signals for each in domains], [(each.accuracy, each.num_images) for each in domains])
    source = _regress(
        [each.source_signals for each in domains], [(each.source_accuracy, each.num_images) for each in domains]
    )
    return GainEstimator(tuple(adapted), tuple(source), *widths)


def _regress(signals: Sequence[tuple[float, ...]], truths: Sequence[tuple[float, int]]) -> NDArray[np.float64]:
    """Return weights by ridge regression on the logits of accuracies; the constant is not shrunk."""
    inputs = np.array(signals)
    counts = np.array([accuracy * number for accuracy, number in truths])
    numbers = np.array([number for _, number in truths])
    targets = np.log((counts + 0.5) / (numbers - counts + 0.5))
    means, scales = inputs[:, 1:].mean(0), inputs[:, 1:].std(0) + 1e-6
    scaled = (inputs[:, 1:] - means) / scales
    penalty = RIDGE * len(inputs) * np.eye(NUM_SIGNALS - 1)
    slopes = np.linalg.solve(scaled.T @ scaled + penalty, scaled.T @ (targets - targets.mean())) / scales
    return np.concatenate([[targets.mean() - slopes @ means], slopes])


def _quantile(errors: Sequence[float]) -> float:
    """Return the quantile that covers 90 % of further errors, as in conformal prediction."""
    place = min(len(errors), math.ceil(COVERAGE * (len(errors) + 1)))
    return sorted(errors)[place - 1]


def _summarize(name: str, values: Sequence[tuple[float, ...]], counts: Sequence[tuple[int, int, int]]) -> DomainSignals:
    numbers = np.array([count for _, _, count in counts], float)
    confidence, plain_confidence, agreement, evenness, plain_evenness = np.average(values, axis=0, weights=numbers)
    right, plain_right, total = (sum(column) for column in zip(*counts, strict=True))
    return DomainSignals(
        name,
        to_signals(confidence, agreement, evenness),
        to_signals(plain_confidence, agreement, plain_evenness),
        right / total,
        plain_right / total,
        total,
    )
