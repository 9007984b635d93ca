"""Tests of the protocols: orders, gradual, rounds, mixed, correlated, single."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import IMAGES, LABELS, NAMES, create_data, create_stream, labels_of

from ctta.data.corruptions import CORRUPTIONS, corrupt
from ctta.data.datasets import ArrayDataset, ImageFiles, clean, sample
from ctta.data.streams import (
    Batch,
    Segment,
    Stream,
    continual,
    correlated,
    corruption_order,
    gradual,
    in_memory,
    mixed,
    rounds,
    single,
)
from ctta.errors import ConfigError, DataError


def test_orders_are_permutations_of_the_fifteen() -> None:
    orders = [corruption_order(None), *(corruption_order(number) for number in range(10))]
    assert len(set(orders)) == 11
    assert all(sorted(order) == sorted(CORRUPTIONS) for order in orders)
    assert orders[0] == tuple(CORRUPTIONS)
    ten = "\n".join(" ".join(order) for order in orders[1:])
    assert (
        hashlib.sha256(ten.encode()).hexdigest() == "8b8f4dca3fc88d91f7dd9905d50732e93441db09adf96c769f548ec48eb8ff8d"
    ), "the ten published orders must not be edited"


def test_gradual_severities() -> None:
    paper = gradual(create_data(), order=3, limit=1)
    severities = [int(domain.split()[1]) for domain in paper.domains]
    assert severities == [1, 2, 3, 4, 5, 4, 3, 2, 1] * 15
    authors = gradual(create_data(), order=3, limit=1, variant="authors")
    assert len(authors.segments) == 131
    assert authors.domains == paper.domains[4:]
    assert authors.domains[:5] == [f"shot_noise {severity}" for severity in (5, 4, 3, 2, 1)]


def test_rounds_and_single_compose() -> None:
    stream = single(rounds(create_stream(limit=2), 3))
    assert [len(batch.x) for batch in stream] == [1] * 12
    assert stream.domains == ["contrast 5", "brightness 5"] * 3


def test_mixed_contains_every_image_once_and_mixes_domains() -> None:
    stream = mixed(create_stream(batch_size=12), seed=3)
    batches = list(stream)
    seen = [pair for batch in batches for pair in zip(batch.domains, batch.index.tolist(), strict=True)]
    assert sorted(seen) == sorted((f"{name} 5", row) for name in NAMES for row in range(24))
    images_of = {f"{name} 5": torch.from_numpy(corrupt(IMAGES, name, 5)).permute(0, 3, 1, 2) / 255 for name in NAMES}
    for batch in batches:
        expected = [images_of[domain][row] for domain, row in zip(batch.domains, batch.index.tolist(), strict=True)]
        torch.testing.assert_close(batch.x, torch.stack(expected))
        assert labels_of(batch).tolist() == LABELS[batch.index].tolist()
    assert 0 < batches[0].domains.count("contrast 5") < 12


def test_mixed_names_the_domain_of_each_image() -> None:
    stream = mixed(create_stream(batch_size=12), seed=3)
    for batch in stream:
        assert batch.domain == "mixed"
        assert set(batch.domains) == {"contrast 5", "brightness 5"}
    again = mixed(rounds(stream, 2), seed=1)
    for batch in again:
        assert labels_of(batch).tolist() == LABELS[batch.index].tolist(), "index in the innermost domain"
    counts = Counter(domain for batch in again for domain in batch.domains)
    assert counts == {"contrast 5": 48, "brightness 5": 48}, "also in a mixture of mixtures"
    twice = torch.cat([batch.x for batch in again])
    dark = twice.flatten(1).std(1) < 0.1  # contrast 5 is nearly gray
    assert dark.tolist() == [domain == "contrast 5" for batch in again for domain in batch.domains]
    assert next(iter(create_stream())).domains == ("contrast 5",) * 10
    assert Batch(twice[:2], None, "own", torch.arange(2)).domains == ("own", "own")


def test_mixed_domains_of_different_sizes() -> None:
    small, large = (in_memory(IMAGES[:, :side], LABELS, name=f"{side}") for side in (16, 32))
    both = Stream("both", [*small.segments, *large.segments], batch_size=48)
    with pytest.raises(DataError):
        next(iter(mixed(both)))
    assert len(list(single(mixed(both)))) == 48


def test_correlated_keeps_every_image_and_groups_labels() -> None:
    many = ArrayDataset(np.zeros((2000, 8, 8, 3), np.uint8), np.arange(2000) % 10, name="black")
    plain = continual(many, names=["contrast"], batch_size=100)
    stream = correlated(plain, concentration=0.1)
    labels = many.labels[stream.segments[0].rows]
    assert sorted(stream.segments[0].rows.tolist()) == list(range(2000))
    distinct = [len(set(labels[start : start + 100].tolist())) for start in range(0, 2000, 100)]
    assert np.mean(distinct) < 5
    even = correlated(plain, concentration=1e6)
    spread = many.labels[even.segments[0].rows].reshape(10, 200)
    assert all(len(set(slot.tolist())) == 10 for slot in spread)


def test_correlated_draws_independently_for_each_segment() -> None:
    whole = correlated(create_stream()).segments
    assert not np.array_equal(whole[0].rows, whole[1].rows)
    plain = create_stream()
    fewer = Stream("fewer", [create_stream(limit=12).segments[0], plain.segments[1]], batch_size=10)
    assert np.array_equal(correlated(fewer).segments[1].rows, whole[1].rows), "independent of earlier segments"


def test_correlated_needs_labels() -> None:
    segment = Segment("d", ImageFiles("p", (Path("a"),), None), np.arange(1))
    with pytest.raises(DataError):
        correlated(Stream("s", [segment]))


def test_custom_frost_photos_are_used_and_enter_the_hash(tmp_path: Path) -> None:
    for name, color in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (300, 200), color).save(tmp_path / name / "a.png")
    black = np.zeros((2, 32, 32, 3), np.uint8)
    hashes = set()
    for photos in (None, tmp_path / "blue", tmp_path / "red"):
        stream = continual(ArrayDataset(black, [0, 1], name="b", frost_photos=photos), names=["frost"])
        hashes.add(stream.hash)
    assert (next(iter(stream)).x[0].amax((1, 2)) * 255).round().tolist() == [90, 0, 0]
    assert len(hashes) == 3
    assert sample(frost_photos=tmp_path / "red").frost_photos == tmp_path / "red"
    with pytest.raises(ConfigError):
        ArrayDataset(black, [0, 1], name="b", frost_photos=tmp_path / "none")


def test_generator_version_enters_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before = create_stream()
    monkeypatch.setattr(clean, "VERSION", 2)
    assert create_stream().hash != before.hash
    assert "corruptions=1" in before.name
