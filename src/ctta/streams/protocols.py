"""The orders in which domains come, each a few lines on top of the readers; the later ones compose.

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

from ctta.datasets.base import CorruptionDataset
from ctta.streams.mixture import Mixture
from ctta.streams.orders import corruption_order
from ctta.streams.stream import Segment, Stream
from ctta.validation import check_integer


def continual(
    data: CorruptionDataset,
    *,
    severity: int = 5,
    order: int | None = None,
    names: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int = 200,
) -> Stream:
    """One corruption after the other at one severity, never reset: the protocol of the paper's tables.

    Args:
        data: a reader.
        severity: 1 to 5.
        order: None for the standard order, or the number of one of the authors' ten.
        names: corruptions of your own choice instead, in this order.
        limit: only the first so many images of each.
        batch_size: images per batch.
    """
    chosen, which = _chosen(order, names)
    steps = [(corruption, severity) for corruption in chosen]
    return _through(data, steps, f"continual severity={severity} {which}", limit, batch_size)


def gradual(
    data: CorruptionDataset,
    *,
    variant: Literal["paper", "authors"] = "paper",
    order: int | None = None,
    names: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int = 200,
) -> Stream:
    """Each corruption comes and goes: severity 1, 2, 3, 4, 5, 4, 3, 2, 1.

    In the authors' code the first one only goes: 5, 4, 3, 2, 1 (131 segments for fifteen corruptions, not 135).
    Args as for :func:`continual`.
    """
    if variant not in ("paper", "authors"):
        raise ValueError(f"variant must be 'paper' or 'authors', got {variant!r}")
    chosen, which = _chosen(order, names)
    come_and_go = (1, 2, 3, 4, 5, 4, 3, 2, 1)
    steps = [(corruption, severity) for corruption in chosen for severity in come_and_go]
    if variant == "authors":
        steps = steps[4:]
    return _through(data, steps, f"gradual {variant} {which}", limit, batch_size)


def _chosen(order: int | None, names: Sequence[str] | None) -> tuple[tuple[str, ...], str]:
    """The corruptions in order, and how to say which these are."""
    if isinstance(names, str):
        raise ValueError(f"names must be a sequence of corruptions, got {names!r}: give ({names!r},)")
    if names is not None:
        if order is not None:
            raise ValueError(f"give order or names, not both: order={order} would not apply to names={tuple(names)}")
        return tuple(names), f"names={'+'.join(names)}"
    return corruption_order(order), f"order={'standard' if order is None else order}"


def _through(
    data: CorruptionDataset, steps: Sequence[tuple[str, int]], name: str, limit: int | None, batch_size: int
) -> Stream:
    limit = None if limit is None else check_integer("limit", limit, 1)
    domains = {step: data.domain(*step) for step in dict.fromkeys(steps)}  # each opened once
    segments = []
    for corruption, severity in steps:
        images = domains[corruption, severity]
        count = len(images) if limit is None else min(limit, len(images))
        segments.append(Segment(f"{corruption} {severity}", images, np.arange(count)))
    limited = "" if limit is None else f" limit={limit}"
    whole = f"{data.name} {name}{limited} batch={batch_size}"
    return Stream(whole, segments, batch_size=batch_size, read_ahead=data.read_ahead)


def rounds(stream: Stream, count: int) -> Stream:
    """The whole stream again and again."""
    count = check_integer("count", count, 1)
    return stream.with_segments(f"rounds={count}", stream.segments * count)


def correlated(stream: Stream, *, concentration: float = 0.1, seed: int = 0, slots: int = 10) -> Stream:
    """Labels in clumps within each segment, as a camera sees them: one object for a while, then another.

    For every class a Dirichlet draw says how its images are shared among consecutive slots of the segment; the smaller
    the concentration, the fewer slots a class appears in.
    """
    if not concentration > 0:
        raise ValueError(f"concentration must be above 0, got {concentration}")
    slots = check_integer("slots", slots, 1)
    segments = []
    for number, segment in enumerate(stream.segments):
        if segment.images.labels is None:
            raise ValueError(f"{segment.domain} has no labels to order its images by")
        labels = segment.images.labels[segment.rows]
        generator = np.random.default_rng([seed, number])
        slot_of = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            shares = generator.dirichlet(np.full(slots, concentration))
            slot_of[members] = np.searchsorted(np.cumsum(shares)[:-1], generator.random(len(members)), side="right")
        tie_break = generator.permutation(len(labels))
        segments.append(replace(segment, rows=segment.rows[np.lexsort((tie_break, labels, slot_of))]))
    return stream.with_segments(f"correlated concentration={concentration:g} slots={slots} seed={seed}", segments)


def mixed(stream: Stream, *, seed: int = 0) -> Stream:
    """All images of the stream shuffled together: every batch holds several domains, which ``batch.domains`` names."""
    mixture = Mixture(stream.segments)
    rows = np.random.default_rng(seed).permutation(len(mixture))
    return stream.with_segments(f"mixed seed={seed}", [Segment("mixed", mixture, rows)])


def single(stream: Stream) -> Stream:
    """The same images one by one."""
    return Stream(f"{stream.name} single", stream.segments, batch_size=1, read_ahead=stream.read_ahead)
