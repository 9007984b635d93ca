"""Label samplers against the published rules, on labels alone: no image is read."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from ctta.data.streams import Segment, Stream, correlated, label_shift, long_tail, mixed, mixed_correlated
from ctta.data.streams.correlation import sample_note, sample_rotta
from ctta.errors import ConfigError, DataError

UNKNOWN: Any = "unknown"


class LabelsOnly:
    """Images of which only the labels can be had."""

    def __init__(self, labels: NDArray[np.int64]) -> None:
        self.name, self.labels = "labels", labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: NDArray[np.int64]) -> NoReturn:
        raise AssertionError("building a stream must not read images")


def make_stream(num_images: int, num_classes: int, *, num_segments: int = 1, batch_size: int = 64) -> Stream:
    labels = np.random.default_rng(9).permutation(np.arange(num_images) % num_classes)
    segments = [Segment(f"d{number}", LabelsOnly(labels), np.arange(num_images)) for number in range(num_segments)]
    return Stream("labels", segments, batch_size=batch_size)


def labels_of_segment(stream: Stream, number: int = 0) -> NDArray[np.integer[Any]]:
    segment = stream.segments[number]
    assert segment.images.labels is not None
    return segment.images.labels[segment.rows]


def run_lengths(labels: NDArray[np.integer[Any]]) -> list[tuple[int, int]]:
    """Return (label, length) of every run of equal labels."""
    ends = np.flatnonzero(np.diff(labels)) + 1
    return [(int(part[0]), len(part)) for part in np.split(labels, ends)]


def test_rotta_splits_each_class_exactly_and_shuffles_the_classes_of_each_slot() -> None:
    num_classes, concentration = 12, 0.3
    labels = np.random.default_rng(1).integers(0, num_classes, 700)
    order = sample_rotta(labels, num_classes, np.random.default_rng(5), concentration, None)
    # The same draws, in the words of the definition.
    generator = np.random.default_rng(5)
    shares = [generator.dirichlet([concentration] * num_classes) for _ in range(num_classes)]
    slots: list[list[list[int]]] = [[] for _ in range(num_classes)]
    for label, share in enumerate(shares):
        members, start = [row for row in range(700) if labels[row] == label], 0
        for slot in range(num_classes):
            end = len(members) if slot == num_classes - 1 else int(sum(share[: slot + 1].tolist()) * len(members))
            slots[slot].append(members[start:end])
            start = end
    expected = []
    for blocks in slots:
        for label in generator.permutation(num_classes):
            expected += blocks[label]
    assert order.tolist() == expected


def test_rotta_has_a_slot_per_class_and_at_most_a_hundred() -> None:
    def find_slots(num_classes: int, num_slots: int | None = None) -> int:
        drawn = []

        class Recorder(np.random.Generator):
            def dirichlet(self, alpha: Any, size: Any = None) -> Any:
                drawn.append(len(alpha))
                return super().dirichlet(alpha, size)

        sample_rotta(np.arange(300) % num_classes, num_classes, Recorder(np.random.PCG64(0)), 0.1, num_slots)
        return drawn[0]

    assert [find_slots(10), find_slots(100), find_slots(150), find_slots(10, 3)] == [10, 100, 100, 3]


def test_note_chunks() -> None:
    num_classes, labels = 10, np.arange(1000) % 10
    order = sample_note(labels, num_classes, np.random.default_rng(3), 0.1, None)
    # The same draws, in the words of the definition.
    generator = np.random.default_rng(3)
    while True:
        sizes = [0] * num_classes
        counts = np.zeros((num_classes, num_classes), int)
        for label in range(num_classes):
            share = generator.dirichlet([0.1] * num_classes)
            share = np.array([part if size < 100 else 0.0 for part, size in zip(share, sizes, strict=True)])
            if share.sum() == 0:
                break
            bounds = [0, *(np.cumsum(share / share.sum()) * 100).astype(int)[:-1].tolist(), 100]
            counts[label] = np.diff(bounds)
            sizes = [size + added for size, added in zip(sizes, counts[label].tolist(), strict=True)]
        if share.sum() > 0 and min(sizes) >= 10:
            break
    members = [generator.permutation(np.arange(label, 1000, 10)).tolist() for label in range(num_classes)]
    expected = []
    for chunk in range(num_classes):
        for label in generator.permutation(num_classes):
            number = int(counts[label, chunk])
            expected += members[label][:number]
            members[label] = members[label][number:]
    assert order.tolist() == expected
    assert counts.sum(0).min() >= 10


def test_note_refuses_too_few_images() -> None:
    with pytest.raises(DataError):
        correlated(make_stream(90, 10), sampler="note")


def test_sorted_is_class_by_class_in_the_order_of_the_stream() -> None:
    plain = make_stream(60, 4)
    rows = correlated(plain, sampler="sorted").segments[0].rows
    labels = labels_of_segment(plain)
    assert rows.tolist() == [row for label in range(4) for row in range(60) if labels[row] == label]


def test_label_shift_has_a_phase_per_class() -> None:
    stream = label_shift(make_stream(1000, 10), imbalance=91, num_per_phase=2000)
    phases = labels_of_segment(stream).reshape(10, 2000)
    majors = [int(np.bincount(phase).argmax()) for phase in phases]
    assert sorted(majors) == list(range(10)) and majors != list(range(10))
    for phase, major in zip(phases, majors, strict=True):
        shares = np.bincount(phase, minlength=10) / 2000
        assert shares[major] == pytest.approx(91 / (91 + 9), abs=0.025)
        assert np.delete(shares, major) == pytest.approx(1 / (91 + 9), abs=0.01)
    one_class = label_shift(make_stream(1000, 10))
    assert len(np.unique(one_class.segments[0].rows)) < 700 < len(one_class.segments[0].rows), "with replacement"
    one_at_a_time = labels_of_segment(one_class)
    assert [length for _, length in run_lengths(one_at_a_time)] == [100] * 10


def test_label_shift_leaves_out_classes_without_images() -> None:
    segment = Segment("d", LabelsOnly(np.array([0, 5, 5])), np.arange(3))
    labels = labels_of_segment(label_shift(Stream("s", [segment]), num_per_phase=4))
    assert sorted(labels.tolist()) == [0] * 4 + [5] * 4


@pytest.mark.parametrize("head", ["constant", "per_domain"])
def test_long_tail_sizes_and_head(head: Any) -> None:
    stream = long_tail(make_stream(2000, 10, num_segments=6), imbalance=100, head=head)
    orders = []
    for number in range(6):
        counts = np.bincount(labels_of_segment(stream, number), minlength=10)
        assert sorted(counts, reverse=True) == [int(200 * 0.01 ** (rank / 9)) for rank in range(10)]
        orders.append(tuple(np.argsort(-counts)))
        rows = stream.segments[number].rows
        assert np.all(np.diff(rows) > 0), "a part of the images, in their order"
    assert (len(set(orders)) == 1) == (head == "constant")
    assert not np.array_equal(stream.segments[0].rows, stream.segments[1].rows), "the kept images are drawn anew"


def test_long_tail_can_be_correlated() -> None:
    stream = long_tail(make_stream(2000, 10), sampler="rotta", concentration=0.2)
    plain = long_tail(make_stream(2000, 10))
    assert sorted(stream.segments[0].rows) == plain.segments[0].rows.tolist()
    assert len(run_lengths(labels_of_segment(stream))) < len(run_lengths(labels_of_segment(plain))) / 3
    assert stream.name.endswith("long_tail imbalance=100 head=constant seed=0 correlated sampler=rotta "
                                "concentration=0.2 seed=0")  # fmt: skip


def test_mixed_correlated_sorts_the_mixture() -> None:
    plain = make_stream(500, 10, num_segments=3)
    stream = mixed_correlated(plain, concentration=0.01)
    assert stream.domains == ["mixed"]
    assert sorted(stream.segments[0].rows) == list(range(1500))
    assert len(run_lengths(labels_of_segment(stream))) < 40 < len(run_lengths(labels_of_segment(mixed(plain))))


BUILDERS: dict[str, Callable[..., Stream]] = {
    "rotta": lambda stream, **settings: correlated(stream, sampler="rotta", **settings),
    "note": lambda stream, **settings: correlated(stream, sampler="note", **settings),
    "iid": lambda stream, **settings: correlated(stream, sampler="iid", **settings),
    "label_shift": label_shift,
    "long_tail": long_tail,
    "mixed_correlated": mixed_correlated,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_draws_depend_on_the_seed_alone_and_differ_between_segments(name: str) -> None:
    build, plain = BUILDERS[name], make_stream(400, 10, num_segments=2)
    stream = build(plain, seed=3)
    assert build(plain, seed=3).hash == stream.hash != build(plain, seed=4).hash != plain.hash
    assert "seed=3" in stream.name
    if name != "mixed_correlated":
        assert not np.array_equal(stream.segments[0].rows, stream.segments[1].rows)


@pytest.mark.parametrize(
    "build",
    [
        lambda stream: correlated(stream, sampler=UNKNOWN),
        lambda stream: correlated(stream, sampler="note", num_slots=0),
        lambda stream: label_shift(stream, imbalance=0.5),
        lambda stream: label_shift(stream, num_per_phase=0),
        lambda stream: long_tail(stream, imbalance=float("nan")),
        lambda stream: long_tail(stream, head=UNKNOWN),
    ],
)
def test_settings_out_of_range(build: Callable[[Stream], object]) -> None:
    with pytest.raises(ConfigError):
        build(make_stream(40, 4))
