"""The orders in which domains arrive; each protocol is a few lines on top of a reader, and the later ones compose.

>>> import numpy as np
>>> from ctta.datasets import Corrupted
>>> from ctta.streams import continual, correlated, rounds
>>> images = np.zeros((20, 32, 32, 3), np.uint8)
>>> data = Corrupted(images, np.arange(20) % 10, name="black")
>>> stream = correlated(rounds(continual(data, names=("fog", "snow"), batch_size=10), 3))
>>> len(stream), stream.domains[:3]
(12, ['fog 5', 'snow 5', 'fog 5'])
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ctta.corruptions.registry import check_severity
from ctta.datasets.base import CorruptionDataset
from ctta.errors import ConfigError, DataError
from ctta.streams.corrupted import as_corruption_dataset
from ctta.streams.mixture import Mixture
from ctta.streams.orders import corruption_order
from ctta.streams.stream import Segment, Stream
from ctta.validation import check_choice, check_integer

BATCH_SIZE = 200  # of the CIFAR-C benchmarks


def continual(
    data: CorruptionDataset | Stream,
    *,
    severity: float = 5,
    order: int | None = None,
    names: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
) -> Stream:
    """Return one corruption after the other at one severity: the protocol of the paper's tables.

    Args:
        data: The dataset, or a stream of clean images, such as :func:`image_folder`'s, to corrupt as they are read.
        severity: 1 (weak) to 5 (strong); a fraction such as 2.25 where images are corrupted as they are read.
        order: None for the standard order, or 0 to 9 for a random order of the authors' code.
        names: Instead of an order, the corruptions to use, in this order.
        limit: Largest number of images per corruption, the first ones; None for all.
        batch_size: Images per batch; by default 200, or that of the given stream.

    Returns:
        The stream.

    Raises:
        ConfigError: Both ``order`` and ``names`` are given, or one has no such value.
        DataError: A file of the dataset is missing or damaged.
        TypeError: ``data`` is neither a dataset with corruptions nor a stream.
    """
    chosen, description = _choose_corruptions(order, names)
    severity = check_severity(severity)
    steps = [(corruption, severity) for corruption in chosen]
    return _build(
        as_corruption_dataset(data, "continual"),
        steps,
        f"continual severity={severity} {description}",
        limit,
        _get_batch_size(data, batch_size),
    )


def gradual(
    data: CorruptionDataset | Stream,
    *,
    variant: Literal["paper", "authors"] = "paper",
    order: int | None = None,
    names: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
) -> Stream:
    """Return one corruption after the other, each with the severities 1, 2, 3, 4, 5, 4, 3, 2, 1.

    In the authors' code the first corruption starts at its strongest, 5, 4, 3, 2, 1, which makes 131 segments for
    fifteen corruptions instead of 135.

    Args:
        data: As for :func:`continual`.
        variant: "paper" (135 segments) or "authors" (131 segments).
        order: As for :func:`continual`.
        names: As for :func:`continual`.
        limit: Largest number of images per segment, the first ones; None for all.
        batch_size: Images per batch; by default 200, or that of the given stream.

    Returns:
        The stream.

    Raises:
        ConfigError: Both ``order`` and ``names`` are given, or a setting has no such value.
        DataError: A file of the dataset is missing or damaged.
        TypeError: ``data`` is neither a dataset with corruptions nor a stream.
    """
    check_choice("variant", variant, ("paper", "authors"))
    chosen, description = _choose_corruptions(order, names)
    severities = (1, 2, 3, 4, 5, 4, 3, 2, 1)
    steps = [(corruption, severity) for corruption in chosen for severity in severities]
    if variant == "authors":
        steps = steps[4:]
    return _build(
        as_corruption_dataset(data, "gradual"),
        steps,
        f"gradual {variant} {description}",
        limit,
        _get_batch_size(data, batch_size),
    )


def rounds(stream: Stream, num_rounds: int) -> Stream:
    """Repeat a stream.

    Args:
        stream: The stream of one round.
        num_rounds: How often to repeat it.

    Returns:
        A stream with the segments of all rounds.
    """
    num_rounds = check_integer("num_rounds", num_rounds, 1)
    return stream.with_segments(f"rounds={num_rounds}", stream.segments * num_rounds)


def correlated(stream: Stream, *, concentration: float = 0.1, seed: int = 0, num_slots: int = 10) -> Stream:
    """Reorder the images within each segment so that their labels are correlated in time, as a camera sees them.

    For every class, a Dirichlet draw decides how its images are distributed over consecutive slots of the segment; the
    lower the concentration, the fewer slots a class appears in.

    Args:
        stream: A stream with labels.
        concentration: Parameter of the Dirichlet distribution, above 0.
        seed: Seed of the draws.
        num_slots: Number of slots per segment.

    Returns:
        A stream of the same images in another order.

    Raises:
        ConfigError: A setting is out of range.
        DataError: A segment has no labels.
    """
    if not concentration > 0:
        raise ConfigError(f"concentration must be above 0, got {concentration}")
    num_slots = check_integer("num_slots", num_slots, 1)
    segments = []
    for number, segment in enumerate(stream.segments):
        if segment.images.labels is None:
            raise DataError(f"{segment.domain} has no labels to order its images by: use a dataset with labels")
        labels = segment.images.labels[segment.rows]
        generator = np.random.default_rng([seed, number])
        slot_of = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            fractions = generator.dirichlet(np.full(num_slots, concentration))
            slot_of[members] = np.searchsorted(np.cumsum(fractions)[:-1], generator.random(len(members)), side="right")
        tie_break = generator.permutation(len(labels))
        segments.append(replace(segment, rows=segment.rows[np.lexsort((tie_break, labels, slot_of))]))
    return stream.with_segments(f"correlated concentration={concentration:g} slots={num_slots} seed={seed}", segments)


def mixed(stream: Stream, *, seed: int = 0) -> Stream:
    """Shuffle all images of a stream together, so that a batch contains several domains.

    Args:
        stream: The stream to shuffle.
        seed: Seed of the order.

    Returns:
        A stream of one segment, "mixed"; ``batch.domains`` names the domain of each image.
    """
    mixture = Mixture(stream.segments)
    rows = np.random.default_rng(seed).permutation(len(mixture))
    return stream.with_segments(f"mixed seed={seed}", [Segment("mixed", mixture, rows)])


def single(stream: Stream) -> Stream:
    """Split a stream into batches of one image.

    Args:
        stream: The stream to split.

    Returns:
        A stream of the same images in the same order.
    """
    return Stream(f"{stream.name} single", stream.segments, batch_size=1, read_ahead=stream.read_ahead)


def _get_batch_size(data: object, batch_size: int | None) -> int:
    """Return the given batch size, else that of the stream, else the benchmark's."""
    if batch_size is not None:
        return batch_size
    return data.batch_size if isinstance(data, Stream) else BATCH_SIZE


def _choose_corruptions(order: int | None, names: Sequence[str] | None) -> tuple[tuple[str, ...], str]:
    """Return the corruptions in order, and a description of the choice for the name of the stream."""
    if isinstance(names, str):
        raise ConfigError(f"names must be a sequence of corruptions, got {names!r}: give ({names!r},)")
    if names is not None:
        if order is not None:
            raise ConfigError(f"give order or names, not both: order={order} does not apply to names={tuple(names)}")
        return tuple(names), f"names={'+'.join(names)}"
    return corruption_order(order), f"order={'standard' if order is None else order}"


def _build(
    data: CorruptionDataset, steps: Sequence[tuple[str, float]], description: str, limit: int | None, batch_size: int
) -> Stream:
    """Return a stream with one segment per corruption and severity."""
    limit = None if limit is None else check_integer("limit", limit, 1)
    domains = {step: data.domain(*step) for step in dict.fromkeys(steps)}  # each opened once
    segments = []
    for corruption, severity in steps:
        images = domains[corruption, severity]
        num_images = len(images) if limit is None else min(limit, len(images))
        segments.append(Segment(f"{corruption} {severity}", images, np.arange(num_images)))
    limited = "" if limit is None else f" limit={limit}"
    name = f"{data.name} {description}{limited} batch={batch_size}"
    return Stream(name, segments, batch_size=batch_size, read_ahead=data.read_ahead)
