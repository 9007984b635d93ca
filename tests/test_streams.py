"""Tests of streams: order, position, reading ahead, hash and validation."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from small_data import IMAGES, LABELS, NAMES, create_data, create_stream, is_same_batch, labels_of
from torch import Tensor

from ctta.data.corruptions import corrupt
from ctta.data.datasets import ArrayDataset
from ctta.data.datasets.base import Rows
from ctta.data.streams import Segment, Stream, continual, correlated, corruption_order, gradual, mixed, rounds
from ctta.errors import ConfigError, InputError

UNKNOWN: Any = "mine"


def test_batches_are_in_order_with_labels_domain_and_index() -> None:
    batches = list(create_stream())
    assert [batch.domain for batch in batches] == ["contrast 5"] * 3 + ["brightness 5"] * 3
    assert [len(batch.x) for batch in batches] == [10, 10, 4] * 2
    expected = corrupt(IMAGES[10:20], "contrast", 5, index=np.arange(10, 20))
    torch.testing.assert_close(batches[1].x, torch.from_numpy(expected).permute(0, 3, 1, 2) / 255)
    assert labels_of(batches[1]).tolist() == LABELS[10:20].tolist()
    assert batches[1].index.tolist() == list(range(10, 20))
    assert batches[1].x.dtype == torch.float32


def test_stream_can_be_iterated_again() -> None:
    stream = create_stream()
    assert len(stream) == 6
    first, second = list(stream), list(stream)
    assert all(is_same_batch(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("read_ahead", [0, 1, 3, 50])
@pytest.mark.parametrize("stop", [0, 1, 2, 5, 6])
def test_saved_position_yields_identical_remaining_batches(stop: int, read_ahead: int) -> None:
    complete = list(create_stream())
    stream = create_stream()
    stream.read_ahead = read_ahead
    iterator = iter(stream)
    for _ in range(stop):
        next(iterator)
    position = stream.position
    assert position == stop
    assert isinstance(iterator, Generator)
    iterator.close()
    resumed = create_stream()
    resumed.position = position
    remaining = list(resumed)
    assert len(remaining) == 6 - stop
    assert all(is_same_batch(one, other) for one, other in zip(remaining, complete[stop:], strict=True))
    with pytest.raises(ConfigError):
        resumed.position = 7


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_position_follows_the_yielded_batches(read_ahead: int) -> None:
    stream = create_stream()
    stream.read_ahead = read_ahead
    iterator = iter(stream)
    next(iterator)
    stream.position = 0
    next(iterator)
    assert stream.position == 2
    for _ in stream:
        if stream.position == len(stream):
            break  # at the last batch, as counting loops do
    assert len(list(stream)) == 6
    stream.position = 6
    assert list(stream) == []
    for index in (-1, 6):
        with pytest.raises(IndexError):
            stream.read_batch(index)
    fraction: Any = 2.0
    with pytest.raises(TypeError):
        stream.position = fraction
    integer: Any = np.int64(2)
    stream.position = integer
    assert type(stream.position) is int, "a JSON file can store it"


def test_read_ahead_uses_other_threads_and_stops_with_the_consumer() -> None:
    threads: set[str] = set()
    second_has_begun = threading.Event()

    class Recording:
        name, labels = "recording", None

        def __len__(self) -> int:
            return 100

        def read(self, rows: Rows) -> tuple[Tensor, None]:
            threads.add(threading.current_thread().name)
            if rows[0] == 1:
                second_has_begun.set()
            return torch.zeros(len(rows), 3, 4, 4), None

    stream = Stream("w", [Segment("d", Recording(), np.arange(100))], batch_size=1, read_ahead=2)
    iterator = iter(stream)
    next(iterator)
    assert second_has_begun.wait(timeout=30), "the second batch was not read in the background"
    assert isinstance(iterator, Generator)
    iterator.close()
    assert threading.current_thread().name not in threads
    assert stream.position == 1
    assert not [thread.name for thread in threading.enumerate() if thread.name in threads]


def test_hash_differs_between_streams_and_name_says_why() -> None:
    variants = [
        create_stream(),
        create_stream(batch_size=8),
        create_stream(severity=4),
        create_stream(limit=12),
        create_stream(names=NAMES[::-1]),
        continual(create_data(seed=1), names=NAMES, batch_size=10),
        continual(ArrayDataset(255 - IMAGES, LABELS, name="noise"), names=NAMES, batch_size=10),
        rounds(create_stream(), 2),
        mixed(create_stream()),
        mixed(create_stream(), seed=1),
        correlated(create_stream()),
        correlated(create_stream(), seed=1),
        gradual(create_data(), names=NAMES, batch_size=10),
        mixed(correlated(create_stream())),
        mixed(correlated(create_stream(), seed=1)),
        mixed(create_stream(names=NAMES[::-1])),
        continual(ArrayDataset(IMAGES, LABELS[::-1], name="noise"), names=NAMES, batch_size=10),
        continual(ArrayDataset(IMAGES.reshape(24, 16, 64, 3), LABELS, name="noise"), names=NAMES, batch_size=10),
    ]
    assert len({stream.hash for stream in variants}) == len(variants)
    assert create_stream().hash == create_stream().hash
    assert " seed=0 continual severity=5 names=contrast+brightness" in create_stream().name
    assert rounds(create_stream(), 2).name == create_stream().name + " rounds=2"


@pytest.mark.parametrize(
    "build",
    [
        lambda: create_stream(batch_size=0),
        lambda: create_stream(limit=0),
        lambda: rounds(create_stream(), 0),
        lambda: correlated(create_stream(), concentration=0),
        lambda: gradual(create_data(), variant=UNKNOWN),
        lambda: corruption_order(10),
        lambda: create_stream(names="fog"),
        lambda: correlated(create_stream(), concentration=float("nan")),
        lambda: create_stream(names=["rust"]),
        lambda: create_stream(severity=6),
        lambda: create_stream(order=3),
        lambda: correlated(create_stream(), num_slots=0),
    ],
)
def test_invalid_settings(build: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        build()


@pytest.mark.parametrize("labels", [LABELS[:3], LABELS + 0.5])
def test_invalid_labels(labels: Any) -> None:
    with pytest.raises(InputError):
        ArrayDataset(IMAGES, labels, name="x")


def test_stream_without_images() -> None:
    with pytest.raises(InputError):
        Stream("empty", [])


@pytest.mark.parametrize("setting", ["batch_size", "limit"])
@pytest.mark.parametrize("value", [2.0, True, "2"])
def test_settings_that_are_not_integers(setting: str, value: Any) -> None:
    with pytest.raises(TypeError, match=setting):
        create_stream(**{setting: value})
    with pytest.raises(TypeError, match="seed"):
        create_data(seed=value)
    assert len(create_stream(**{setting: np.int64(2)})) > 0
