"""Streams whose domains come back: visit after visit, with images drawn anew."""

from dataclasses import replace
from typing import Unpack

import numpy as np

from ctta.core.validation import check_integer
from ctta.data.datasets.base import CorruptionDataset
from ctta.data.streams.correlation import Sampler, correlated
from ctta.data.streams.sequences import CorruptionChoice, choose_corruptions, continual, group_by_kind
from ctta.data.streams.stream import Stream
from ctta.errors import ConfigError


def rounds(stream: Stream, num_rounds: int) -> Stream:
    """Repeat a stream, batch by batch; :func:`recurring` draws the images of every visit anew.

    Args:
        stream: The stream of one round.
        num_rounds: How often to repeat it.

    Returns:
        A stream with the segments of all rounds; each round is a visit.
    """
    num_rounds = check_integer("num_rounds", num_rounds, 1)
    num_visits = max(stream.visits) + 1
    segments = [
        replace(segment, visit=segment.visit + number * num_visits)
        for number in range(num_rounds)
        for segment in stream.segments
    ]
    return stream.with_segments(f"rounds={num_rounds}", segments)


def recurring(
    data: CorruptionDataset | Stream,
    *,
    num_visits: int = 20,
    sampler: Sampler = "rotta",
    concentration: float = 0.1,
    num_slots: int | None = None,
    seed: int = 0,
    **corruptions: Unpack[CorruptionChoice],
) -> Stream:
    """Return the corruptions again and again, with images drawn anew at each visit: PeTTA's recurring adaptation.

    Args:
        data: As for :func:`continual`.
        num_visits: How often each corruption comes.
        sampler: As for :func:`correlated`; "iid" shuffles the images of every visit.
        concentration: As for :func:`correlated`; PeTTA has 0.01 for CIFAR100-C.
        num_slots: As for :func:`correlated`.
        seed: Seed of the draws.
        **corruptions: Keywords of :func:`continual`. Without names, ``order`` is 5 by default, as for RoTTA and PeTTA;
            PeTTA has a ``batch_size`` of 64.

    Returns:
        The stream; ``stream.visits`` has the visit of every segment, and a result its ``visit_errors``.

    Raises:
        ConfigError: A setting is out of range.
        DataError: There are too few images for the sampler; and what :func:`continual` raises.
    """
    num_visits = check_integer("num_visits", num_visits, 1)
    corruptions["order"] = corruptions.get("order", 5) if corruptions.get("names") is None else None
    visit = continual(data, **corruptions)
    return correlated(
        rounds(visit, num_visits), sampler=sampler, concentration=concentration, num_slots=num_slots, seed=seed
    )


def cyclic(
    data: CorruptionDataset | Stream, *, num_visits: int = 20, seed: int = 0, **corruptions: Unpack[CorruptionChoice]
) -> Stream:
    """Return the corruptions kind by kind (noise, blur, weather, digital), and the kinds again and again in this order.

    Whenever a kind comes back, its corruptions are in another order and their images are shuffled anew.

    Args:
        data: As for :func:`continual`.
        num_visits: How often each kind comes.
        seed: Seed of the orders.
        **corruptions: Keywords of :func:`continual`; the kinds come in the order of their first corruptions.

    Returns:
        The stream.

    Raises:
        ConfigError: A setting is out of range, or a corruption is of no known kind; and what :func:`continual` raises.
    """
    num_visits, seed = check_integer("num_visits", num_visits, 1), check_integer("seed", seed, 0)
    if hasattr(data, "shifts"):
        raise ConfigError(f"cyclic needs corruptions, which have kinds; the domains of {type(data).__name__} have none")
    chosen, _ = choose_corruptions(corruptions.get("order"), corruptions.get("names"))
    base = continual(data, **corruptions)
    segment_of = dict(zip(chosen, base.segments, strict=True))
    segments = []
    for visit in range(num_visits):
        generator = np.random.default_rng([seed, visit, 1])  # not the draws of the shuffles
        for members in group_by_kind(chosen).values():
            segments += [replace(segment_of[name], visit=visit) for name in generator.permutation(members)]
    return correlated(base.with_segments(f"cyclic visits={num_visits}", segments), sampler="iid", seed=seed)


def cdc(
    data: CorruptionDataset | Stream,
    *,
    num_visits: int = 20,
    sampler: Sampler = "iid",
    concentration: float = 0.1,
    seed: int = 0,
    **corruptions: Unpack[CorruptionChoice],
) -> Stream:
    """Return the corruptions in pieces of random length: the continually and dynamically changing domains (CDC).

    Within a visit, until all images are used, a random corruption comes with a random number of its remaining batches.

    Args:
        data: As for :func:`continual`.
        num_visits: How often all images come.
        sampler: As for :func:`correlated`; "iid" shuffles the images of every visit.
        concentration: As for :func:`correlated`.
        seed: Seed of the draws.
        **corruptions: Keywords of :func:`continual`; their order says which corruption a draw stands for.

    Returns:
        The stream, with a segment for every piece.

    Raises:
        ConfigError: A setting is out of range.
        DataError: There are too few images for the sampler; and what :func:`continual` raises.
    """
    num_visits = check_integer("num_visits", num_visits, 1)
    base = continual(data, **corruptions)
    whole = correlated(rounds(base, num_visits), sampler=sampler, concentration=concentration, seed=seed)
    pieces = []
    for visit in range(num_visits):
        generator = np.random.default_rng([seed, visit, 1])  # not the draws of the sampler
        waiting = [segment for segment in whole.segments if segment.visit == visit]
        while waiting:
            number = int(generator.integers(len(waiting)))
            num_batches = generator.integers(1, waiting[number].num_batches(base.batch_size), endpoint=True)
            segment, num_images = waiting.pop(number), int(num_batches) * base.batch_size
            pieces.append(replace(segment, rows=segment.rows[:num_images]))
            if len(segment.rows) > num_images:
                waiting.insert(number, replace(segment, rows=segment.rows[num_images:]))
    return whole.with_segments("cdc", pieces)
