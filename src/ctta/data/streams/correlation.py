"""Streams whose labels are correlated in time, shift or have a long tail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from ctta.core.validation import check_choice, check_integer, check_positive
from ctta.data.datasets.base import Rows
from ctta.data.streams.mixture import mixed
from ctta.data.streams.samplers import SAMPLERS, Labels, draw_label_shift, draw_long_tail
from ctta.data.streams.stream import Segment, Stream
from ctta.errors import ConfigError, DataError

Sampler = Literal["rotta", "note", "sorted", "iid"]


def correlated(
    stream: Stream,
    *,
    sampler: Sampler = "rotta",
    concentration: float = 0.1,
    seed: int = 0,
    num_slots: int | None = None,
) -> Stream:
    """Reorder the images within each segment so that their labels are correlated in time, as a camera sees them.

    Every segment has its own draws, also where a domain comes back. The same concentration is another stream with
    another sampler: compare :attr:`Stream.composition` instead.

    Args:
        stream: A stream with labels.
        sampler: "rotta" (RoTTA, PeTTA) or "note" (NOTE and others), which split each class over slots by a Dirichlet
            draw; "sorted", class by class; or "iid", a plain shuffle.
        concentration: Parameter of the Dirichlet distribution, above 0; the lower, the fewer slots a class appears in.
        seed: Seed of the draws.
        num_slots: Number of slots per segment. By default min(C, 100) for C classes in "rotta", and C in "note".

    Returns:
        A stream of the same images in another order.

    Raises:
        ConfigError: A setting is out of range.
        DataError: A segment has no labels, or too few images for the sampler.
    """
    check_choice("sampler", sampler, tuple(SAMPLERS))
    check_positive("concentration", concentration)
    seed = check_integer("seed", seed, 0)
    num_slots = None if num_slots is None else check_integer("num_slots", num_slots, 1)
    sample = SAMPLERS[sampler]

    def reorder(number: int, labels: Labels, num_classes: int) -> Rows:
        generator = np.random.default_rng([seed, number])
        return sample(labels, num_classes, generator, concentration, num_slots)

    slots = f" slots={num_slots}" if num_slots else ""
    suffixes = {"sorted": "correlated sampler=sorted", "iid": f"shuffled seed={seed}"}
    drawn = f"correlated sampler={sampler} concentration={concentration:g}{slots} seed={seed}"
    return stream.with_segments(suffixes.get(sampler, drawn), _reorder(stream, reorder))


def mixed_correlated(
    stream: Stream,
    *,
    sampler: Sampler = "note",
    concentration: float = 0.1,
    seed: int = 0,
    num_slots: int | None = None,
) -> Stream:
    """Shuffle all images of a stream together and correlate their labels in time: many domains, few classes at a time.

    Args:
        stream: A stream with labels.
        sampler: As for :func:`correlated`.
        concentration: As for :func:`correlated`.
        seed: Seed of both.
        num_slots: As for :func:`correlated`.

    Returns:
        A stream of one segment, "mixed".

    Raises:
        ConfigError: A setting is out of range.
        DataError: A segment has no labels, or too few images for the sampler.
    """
    shuffled = mixed(stream, seed=seed)
    return correlated(shuffled, sampler=sampler, concentration=concentration, seed=seed, num_slots=num_slots)


def label_shift(stream: Stream, *, imbalance: float = 500_000.0, num_per_phase: int = 100, seed: int = 0) -> Stream:
    """Draw images with replacement in one phase per class, in which this class prevails: the protocol of SAR.

    Args:
        stream: A stream with labels.
        imbalance: How much more likely the class of a phase is than another one, from 1 (all alike); SAR reports 1,
            1000, 2000, 3000, 4000, 5000 and 500000, which is one class at a time.
        num_per_phase: Images per phase.
        seed: Seed of the draws; every segment has its own.

    Returns:
        A stream with one phase per class in every segment.

    Raises:
        ConfigError: A setting is out of range.
        DataError: A segment has no labels.
    """
    _check_imbalance(imbalance)
    num_per_phase, seed = check_integer("num_per_phase", num_per_phase, 1), check_integer("seed", seed, 0)

    def draw(number: int, labels: Labels, num_classes: int) -> Rows:
        return draw_label_shift(labels, num_classes, np.random.default_rng([seed, number]), imbalance, num_per_phase)

    settings = f"imbalance={imbalance:g} phase={num_per_phase} seed={seed}"
    return stream.with_segments(f"label_shift {settings}", _reorder(stream, draw))


def long_tail(
    stream: Stream,
    *,
    imbalance: float = 100.0,
    head: Literal["constant", "per_domain"] = "constant",
    sampler: Sampler | None = None,
    concentration: float = 0.1,
    seed: int = 0,
) -> Stream:
    """Leave out images so that the classes have a long tail: the global imbalance of TRIBE's GLI-TTA.

    The class of rank c = 0, ..., C - 1 keeps n_max / imbalance^(c / (C - 1)) images.

    Args:
        stream: A stream with labels.
        imbalance: Ratio of the most frequent class to the rarest, from 1; TRIBE reports 10, 100 and 200.
        head: "constant", the same ranks of the classes everywhere, or "per_domain", drawn anew for every segment.
        sampler: Also correlate labels in time, as :func:`correlated` does; None keeps the order of the images.
        concentration: As for :func:`correlated`.
        seed: Seed of the ranks and of the draws.

    Returns:
        A stream of a part of the images.

    Raises:
        ConfigError: A setting is out of range.
        DataError: A segment has no labels.
    """
    _check_imbalance(imbalance)
    check_choice("head", head, ("constant", "per_domain"))
    seed = check_integer("seed", seed, 0)

    def draw(number: int, labels: Labels, num_classes: int) -> Rows:
        generator = np.random.default_rng([seed, number, 1])  # not the draws of the sampler
        ranked_by = generator if head == "per_domain" else np.random.default_rng(seed)
        ranks = ranked_by.permutation(num_classes)
        return draw_long_tail(labels, ranks, num_classes, generator, imbalance)

    suffix = f"long_tail imbalance={imbalance:g} head={head} seed={seed}"
    tailed = stream.with_segments(suffix, _reorder(stream, draw))
    if sampler is None:
        return tailed
    return correlated(tailed, sampler=sampler, concentration=concentration, seed=seed)


def _reorder(stream: Stream, draw: Callable[[int, Labels, int], Rows]) -> list[Segment]:
    """Return the segments with other rows: a function of the segment's number, its labels, and the number of classes.

    Raises:
        DataError: A segment has no labels.
    """
    segments = []
    for number, segment in enumerate(stream.segments):
        labels = segment.images.labels
        if labels is None:
            raise DataError(f"{segment.domain} has no labels to order its images by: use a dataset with labels")
        if labels.min() < 0:
            raise DataError(f"{segment.domain} has foreign images, which have no class: apply foreign() last")
        num_classes = max(len(segment.class_names), int(labels.max()) + 1)
        segments.append(replace(segment, rows=segment.rows[draw(number, labels[segment.rows], num_classes)]))
    return segments


def _check_imbalance(imbalance: float) -> None:
    if not 1 <= imbalance < float("inf"):
        raise ConfigError(f"imbalance must be a ratio from 1 (balanced), got {imbalance}")
