"""Fit the estimate of accuracy without labels to corrupted images with known answers; CoTTA's threshold."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from ctta.advise.candidates import Candidate
from ctta.advise.images import ImageSource, ImageStreams, LabeledImages, gather_images, label_images
from ctta.core.validation import check_batch_stats, check_fraction
from ctta.data.corruptions import HOLD_OUT
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.base import CLEAN
from ctta.errors import ConfigError, InputError
from ctta.evaluation.steps import find_weight
from ctta.functional import confidence
from ctta.guard.estimate import NUM_SIGNALS, GainEstimator, measure, to_signals
from ctta.guard.summary import summarize
from ctta.methods import Source
from ctta.nn import BatchStats
from ctta.nn.surgery import Output, copy_for_adaptation, iter_inputs, validate_batches

SEVERITIES = (1.0, 3.0, 5.0)
RIDGE = 0.1
#: Quantiles of Student's t for two-sided intervals of 90 %, for 1, 2, ... degrees of freedom.
T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True)
class DomainSignals:
    """What shows of a domain without labels, and the truth, with adaptation and without."""

    domain: str  # name of the corruption, for leaving it out
    signals: tuple[float, ...]
    source_signals: tuple[float, ...]
    accuracy: float
    source_accuracy: float
    num_images: int
    #: The same of its first and of its second images, which are the same ones in every domain; empty for one batch.
    halves: tuple["DomainSignals", ...] = ()


def calibrate_gain(
    net: nn.Module,
    images: ImageSource,
    labels: ArrayLike | None = None,
    *,
    method: str,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    severities: Sequence[float] = SEVERITIES,
    corruptions: Sequence[str] = tuple(HOLD_OUT),
    limit: int | None = 200,
    seed: int = 0,
) -> GainEstimator:
    """Calibrate the estimate of accuracy without labels for a network and a method.

    The method adapts to clean images and to corruptions at several severities. Weights are fitted by ridge regression.
    The half-widths of the 90 % intervals come from errors on corruptions and images that were left out of the fit, see
    :func:`fit_estimator`; more corruptions make them more certain, and so narrower.

    Args:
        net: The network, for images in [0, 1].
        images: Clean images, as for :func:`ctta.advise`.
        labels: As for :func:`ctta.advise`. Without labels, the network's answers on the clean images count as right,
            and the estimates are about these.
        method: Name of the method.
        settings: Its settings, with the values of ``--set``.
        batch_size: Images per step.
        severities: Severities of the corruptions.
        corruptions: The corruptions; by default the four that no benchmark reports.
        limit: Number of images; None for all.
        seed: Seed of the draws.

    Returns:
        The estimator, for ``ctta.Guarded(model, estimator=...)``.
    """
    labeled = label_images(net, gather_images(images, labels, size=None, limit=limit, seed=seed), seed=seed)
    steps = list_steps(corruptions, severities)
    return fit_estimator(collect_signals(net, labeled, Candidate(method, dict(settings or {})), steps, batch_size))


def list_steps(
    corruptions: Sequence[str] = tuple(HOLD_OUT), severities: Sequence[float] = SEVERITIES
) -> list[tuple[str, float]]:
    """Return the domains to calibrate on: clean images, then every corruption at one severity after the other."""
    if len(set(corruptions)) < 2:
        raise ConfigError(f"expected two corruptions or more, as one at a time is left out, got {list(corruptions)}")
    return [(CLEAN, 0.0), *((name, check_corruption(name, each)) for each in severities for name in corruptions)]


def collect_signals(
    net: nn.Module,
    labeled: LabeledImages,
    candidate: Candidate,
    steps: Sequence[tuple[str, float]],
    batch_size: int,
    on_domain: Callable[[int, int], None] | None = None,
) -> list[DomainSignals]:
    """Let a candidate adapt to images under corruptions, and record signals and truth of each domain."""
    stream = ImageStreams(labeled).build_stream(steps, batch_size=batch_size)
    return record_signals(candidate.build(net), Source(net), stream, [name for name, _ in steps], on_domain)


def record_signals(
    model: nn.Module,
    source: nn.Module,
    stream: Any,
    names: Sequence[str],
    on_domain: Callable[[int, int], None] | None = None,
) -> list[DomainSignals]:
    """Send a labeled stream through a model and its source; return signals and truth of each segment."""
    weight = find_weight(model)
    found: list[DomainSignals] = []
    for segment, batches in groupby(enumerate(stream), lambda numbered: int(stream.segment_index(numbered[0]))):
        values: list[tuple[float, ...]] = []
        counts: list[tuple[int, int, int]] = []
        for _, batch in batches:
            x = batch.x.to(weight)
            plain, adapted = summarize(source(x).cpu()), summarize(model(x).cpu())
            values.append(measure(adapted, plain))
            right, plain_right = (int((each.classes == batch.y).sum()) for each in (adapted, plain))
            counts.append((right, plain_right, len(x)))
        whole, half = _summarize(names[segment], values, counts), len(values) // 2
        places = (slice(half), slice(half, None)) if half else ()
        halves = tuple(_summarize(names[segment], values[each], counts[each]) for each in places)
        found.append(replace(whole, halves=halves))
        if on_domain:
            on_domain(len(found), len(names))
    return found


def fit_estimator(domains: Sequence[DomainSignals]) -> GainEstimator:
    """Fit weights to domains, and half-widths to errors on corruptions and images that were left out.

    One corruption at a time is left out, or the clean images, and half of the images: how hard images are is common to
    all domains, so that errors on the same images are too small. Errors under one corruption resemble each other, so
    that there are as many observations as corruptions: a half-width is their root mean square times the quantile of
    Student's t with as many degrees of freedom.
    """
    names = list(dict.fromkeys(each.domain for each in domains))
    folds = [(domains, domains)]
    if all(each.halves for each in domains):
        first, second = ([each.halves[place] for each in domains] for place in (0, 1))
        folds = [(first, second), (second, first)]
    squares = []
    for name in names:
        errors = [
            _find_errors(
                _fit([each for each in fitted if each.domain != name]), [each for each in others if each.domain == name]
            )
            for fitted, others in folds
        ]
        squares.append(np.square(np.concatenate(errors)).mean(0))
    widths = _t_quantile(len(names)) * np.sqrt(np.mean(squares, 0))
    return replace(
        _fit(domains), half_width=float(widths[0]), source_half_width=float(widths[1]), gain_half_width=float(widths[2])
    )


def _find_errors(estimator: GainEstimator, domains: Sequence[DomainSignals]) -> NDArray[np.float64]:
    """Return the errors (N, 3) of both accuracies and of the gain."""
    found = [estimator.estimate(each.signals, each.source_signals) for each in domains]
    values = [[each.accuracy, each.source_accuracy, each.gain] for each in found]
    truths = [[each.accuracy, each.source_accuracy, each.accuracy - each.source_accuracy] for each in domains]
    errors: NDArray[np.float64] = np.array(values) - np.array(truths)
    return errors


def _t_quantile(freedom: int) -> float:
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.645 + 1.6 / freedom


def _fit(domains: Sequence[DomainSignals]) -> GainEstimator:
    """Return an estimator whose half-widths are not known yet."""
    adapted = _regress([each.signals for each in domains], [(each.accuracy, each.num_images) for each in domains])
    source = _regress(
        [each.source_signals for each in domains], [(each.source_accuracy, each.num_images) for each in domains]
    )
    return GainEstimator(tuple(adapted), tuple(source), 0.0, 0.0, 0.0)


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


@torch.no_grad()
def calibrate_threshold(
    net: nn.Module,
    batches: Iterable[Any],
    *,
    quantile: float = 0.05,
    margin: float = 0.05,
    batch_stats: BatchStats = "auto",
    output: Output = None,
) -> float:
    """Compute CoTTA's ``threshold`` for a network by the rule of the reference implementation.

    The threshold is the 5 % quantile of the source model's confidence on source images, minus 0.05: a lower confidence
    is below the source's usual one. For dense predictions every pixel counts, so a few images are enough.

    Args:
        net: Source network; not modified.
        batches: Source inputs, or tuples that start with them; labels are ignored.
        quantile: Quantile of the confidence, from 0 to 1.
        margin: Subtracted from the quantile.
        batch_stats: The value that CoTTA will be given, since it computes the source's confidence in that mode.
        output: Where to find the logits in what the network returns, if it cannot be inferred.

    Returns:
        The threshold.

    Raises:
        InputError: If there is no source image, or a batch is not valid.

    >>> net = nn.Linear(4, 2)
    >>> 0.4 < calibrate_threshold(net, [torch.randn(100, 4)]) < 1
    True
    """
    check_fraction("quantile", quantile)
    check_batch_stats(batch_stats)
    source = copy_for_adaptation(net, batch_stats=batch_stats, output=output)
    confidences = []
    for x in validate_batches(iter_inputs(batches)):
        if len(x):
            confidences.append(confidence(source(x)).flatten().cpu())
    if not confidences:
        raise InputError("got no source images to calibrate on, expected at least one batch")
    # By sorting: torch.quantile rejects more than 2**24 values, which a few dense predictions already exceed.
    ordered = torch.cat(confidences).sort().values
    position = quantile * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below].lerp(ordered[above], position - below)) - margin
