"""Sequences of corruptions, one after the other: what the other protocols repeat, reorder and mix.

>>> import numpy as np
>>> from ctta.data.datasets import Corrupted
>>> from ctta.data.streams import continual, correlated, rounds
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

from ctta.core.validation import check_choice, check_integer
from ctta.data.corruptions.registry import check_severity
from ctta.data.datasets.base import CorruptionDataset
from ctta.data.datasets.corruptible import CLEAN
from ctta.data.streams.corrupted import as_corruption_dataset
from ctta.data.streams.orders import corruption_order
from ctta.data.streams.stream import Segment, Stream
from ctta.errors import ConfigError

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
    chosen, description = choose_corruptions(order, names)
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
    chosen, description = choose_corruptions(order, names)
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


def clean(data: CorruptionDataset | Stream, *, limit: int | None = None, batch_size: int | None = None) -> Stream:
    """Return the images as they are: a method should do no harm where nothing has changed.

    Args:
        data: A dataset that has its clean images, or a stream of clean images.
        limit: Largest number of images per segment, the first ones; None for all.
        batch_size: Images per batch; by default 200, or that of the given stream.

    Returns:
        A stream of one segment, "clean", or those of the given stream.

    Raises:
        DataError: The dataset has corrupted images only, such as CIFAR-10-C as it is published.
        TypeError: ``data`` is neither a dataset with corruptions nor a stream.
    """
    batch_size = _get_batch_size(data, batch_size)
    if not isinstance(data, Stream):
        return _build(as_corruption_dataset(data, "clean"), [(CLEAN, 1)], "clean", limit, batch_size)
    limit = None if limit is None else check_integer("limit", limit, 1)
    segments = [replace(segment, rows=segment.rows[:limit]) for segment in data.segments]
    name = f"{data.name} clean{_describe_limit(limit)} batch={batch_size}"
    return Stream(name, segments, batch_size=batch_size, read_ahead=data.read_ahead)


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


def choose_corruptions(order: int | None, names: Sequence[str] | None) -> tuple[tuple[str, ...], str]:
    """Return the corruptions in order, and a description of the choice for the name of the stream.

    Args:
        order: None for the standard order, or 0 to 9.
        names: Instead of an order, the corruptions, in this order.

    Returns:
        The corruptions and the description.

    Raises:
        ConfigError: Both are given, or one has no such value.
    """
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
    """Return a stream with one segment per corruption and severity; images as they are have neither."""
    limit = None if limit is None else check_integer("limit", limit, 1)
    domains = {step: data.domain(*step) for step in dict.fromkeys(steps)}  # each opened once
    segments = []
    for corruption, severity in steps:
        images = domains[corruption, severity]
        num_images = len(images) if limit is None else min(limit, len(images))
        name = "clean" if corruption == CLEAN else f"{corruption} {severity}"
        segments.append(Segment(name, images, np.arange(num_images)))
    name = f"{data.name} {description}{_describe_limit(limit)} batch={batch_size}"
    return Stream(name, segments, batch_size=batch_size, read_ahead=data.read_ahead)


def _describe_limit(limit: int | None) -> str:
    return "" if limit is None else f" limit={limit}"
