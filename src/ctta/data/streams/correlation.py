"""Streams whose labels are correlated in time, shift or have a long tail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctta.core.validation import check_choice, check_integer, check_positive
from ctta.data.datasets.base import Rows
from ctta.data.streams.stream import Segment, Stream, mixed
from ctta.errors import ConfigError, DataError

Labels = NDArray[np.integer[Any]]

#: Slots of RoTTA's sampler for data with more classes than this.
MAX_SLOTS = 100
#: The fewest images in a chunk of NOTE's sampler, and how often it is drawn before giving up.
MIN_CHUNK, MAX_DRAWS = 10, 10_000


def sample_rotta(
    labels: Labels, num_classes: int, generator: np.random.Generator, concentration: float, num_slots: int | None
) -> Rows:
    """Return the order of RoTTA and PeTTA.

    The images of a class are split over consecutive slots at the cumulative proportions of a Dirichlet draw. Within a
    slot the classes come in an order that is drawn anew, each as one block. By default there are min(C, 100) slots.
    """
    num_slots = num_slots or min(num_classes, MAX_SLOTS)
    proportions = generator.dirichlet(np.full(num_slots, concentration), num_classes)
    parts = []
    for members, fractions in zip(group_by_class(labels, num_classes), proportions, strict=True):
        parts.append(np.split(members, _cut(fractions, len(members))))
    return _chain_slots(parts, generator)


def sample_note(
    labels: Labels, num_classes: int, generator: np.random.Generator, concentration: float, num_slots: int | None
) -> Rows:
    """Return the order of NOTE, which others took over.

    As for RoTTA, but chunks that already hold their share of the images get nothing of a further class, the images of
    a class are shuffled, and everything is drawn again until each chunk has at least ten images. By default there are
    C chunks.
    """
    num_chunks = num_slots or num_classes
    counts = np.bincount(labels, minlength=num_classes)
    cuts = None
    for _ in range(MAX_DRAWS if len(labels) >= MIN_CHUNK * num_chunks else 0):
        if (cuts := _draw_chunks(counts, num_chunks, concentration, generator)) is not None:
            break
    if cuts is None:
        raise DataError(
            f"the sampler 'note' needs at least {MIN_CHUNK} images in each of {num_chunks} chunks, and found no such "
            f"split of {len(labels)} images: use more images, fewer chunks (num_slots), or the sampler 'rotta'"
        )
    groups = group_by_class(labels, num_classes)
    parts = [np.split(generator.permutation(members), cut) for members, cut in zip(groups, cuts, strict=True)]
    return _chain_slots(parts, generator)


#: The samplers by name; each takes labels, the number of classes C, a generator, the concentration and the number of
#: slots, and returns the indices of the images, each once.
SAMPLERS: dict[str, Callable[[Labels, int, np.random.Generator, float, int | None], Rows]] = {
    "rotta": sample_rotta,
    "note": sample_note,
    "sorted": lambda labels, *_: np.argsort(labels, kind="stable"),  # class by class; nothing is drawn
    "iid": lambda labels, _num_classes, generator, *_: generator.permutation(len(labels)),
}


def group_by_class(labels: Labels, num_classes: int) -> list[Rows]:
    """Return the indices of the images of each class, in ascending order."""
    ends = np.cumsum(np.bincount(labels, minlength=num_classes))
    return np.split(np.argsort(labels, kind="stable"), ends[:-1])


def _cut(fractions: NDArray[np.float64], number: int) -> Rows:
    """Return where to split a number of images so that the parts have these fractions."""
    return (np.cumsum(fractions)[:-1] * number).astype(np.int64)


def _draw_chunks(
    counts: NDArray[np.integer[Any]], num_chunks: int, concentration: float, generator: np.random.Generator
) -> list[Rows] | None:
    """Return where to split each class over the chunks, or None if a chunk stays too small."""
    sizes, cuts = np.zeros(num_chunks, np.int64), []
    for count in counts:
        fractions = generator.dirichlet(np.full(num_chunks, concentration)) * (sizes < counts.sum() / num_chunks)
        if not fractions.sum() > 0:  # all of the draw fell on full chunks
            return None
        cuts.append(_cut(fractions / fractions.sum(), count))
        sizes += np.diff(cuts[-1], prepend=0, append=count)
    return cuts if sizes.min() >= MIN_CHUNK else None


def _chain_slots(parts: list[list[Rows]], generator: np.random.Generator) -> Rows:
    """Return the slots one after the other, each with its classes in a random order."""
    num_classes, num_slots = len(parts), len(parts[0])
    blocks = [parts[label][slot] for slot in range(num_slots) for label in generator.permutation(num_classes)]
    return np.concatenate(blocks)


Sampler = Literal["rotta", "note", "sorted", "iid"]


def correlated(
    stream: Stream,
    *,
    sampler: Sampler = "rotta",
    concentration: float = 0.1,
    num_slots: int | None = None,
    seed: int = 0,
) -> Stream:
    """Reorder the images within each segment so that their labels are correlated in time, as a camera sees them.

    Every segment has its own draws, also where a domain comes back. The same concentration is another stream with
    another sampler: compare :attr:`Stream.composition` instead.

    Args:
        stream: A stream with labels.
        sampler: "rotta" (RoTTA, PeTTA) or "note" (NOTE and others), which split each class over slots by a Dirichlet
            draw; "sorted", class by class; or "iid", a plain shuffle.
        concentration: Parameter of the Dirichlet distribution, above 0; the lower, the fewer slots a class appears in.
        num_slots: Number of slots per segment. By default min(C, 100) for C classes in "rotta", and C in "note".
        seed: Seed of the draws.

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

    In a phase its own class has the probability q = r / (r + C - 1) and every other one 1 / (r + C - 1), where r is the
    imbalance. The order of the phases is random; classes without images have no phase.

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
        generator, rows = np.random.default_rng([seed, number]), []
        groups = [members for members in group_by_class(labels, num_classes) if len(members)]
        for phase in generator.permutation(len(groups)):
            odds = np.ones(len(groups))
            odds[phase] = imbalance
            drawn = generator.choice(len(groups), num_per_phase, p=odds / odds.sum())
            rows += [groups[group][generator.integers(len(groups[group]))] for group in drawn]
        return np.array(rows, dtype=np.int64)

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

    The class of rank c = 0, ..., C - 1 keeps n_max / imbalance^(c / (C - 1)) images, or all if it has fewer; n_max is
    the size of the largest class.

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
        groups = group_by_class(labels, num_classes)
        largest, kept = max(map(len, groups)), []
        for members, rank in zip(groups, ranks, strict=True):
            num_kept = int(largest * imbalance ** (-rank / max(1, num_classes - 1)))
            kept.append(generator.permutation(members)[: max(1, num_kept)])
        return np.sort(np.concatenate(kept))

    suffix = f"long_tail imbalance={imbalance:g} head={head} seed={seed}"
    tailed = stream.with_segments(suffix, _reorder(stream, draw))
    if sampler is None:
        return tailed
    return correlated(tailed, sampler=sampler, concentration=concentration, seed=seed)


def _reorder(stream: Stream, draw: Callable[[int, Labels, int], Rows]) -> list[Segment]:
    """Return the segments with other rows, drawn by the segment's number, its labels, and the number of classes."""
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
