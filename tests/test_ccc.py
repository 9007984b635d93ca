"""CCC: the accuracy matrix, the walk, and the stream, without images where it can be."""

from itertools import islice, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_images import random_images
from torch import Tensor, nn

import ctta
from ctta.data.datasets import ArrayDataset, CifarC
from ctta.data.streams import AccuracyMatrix, ccc, in_memory, measure_accuracy, walk
from ctta.data.streams.ccc import NOISES, Point, find_path
from ctta.errors import ConfigError, DataError, InputError

Table = NDArray[np.float64]
FADING = np.linspace(1, 0, 21)
NAMES = ("fog", "snow", "contrast")
#: The accuracy of every pair falls from 0.9 to 0.1 with either severity.
MATRIX = AccuracyMatrix({pair: 0.1 + 0.8 * np.outer(FADING, FADING) for pair in permutations(NAMES, 2)}, num_classes=10)


def make_data(count: int = 30, **settings: Any) -> ArrayDataset:
    return ArrayDataset(random_images(count, 8, 8), np.arange(count) % 3, name="small", **settings)


def recurse(table: Table, target: float, i: int, j: int) -> list[Point]:
    """Return the rest of a walk as the definition says it, without a table of results."""
    if i == 0:
        return [(i, j)]
    fading = [(i, j), *recurse(table, target, i - 1, j)]
    if j == len(table) - 1:
        return fading
    growing = [(i, j), *recurse(table, target, i, j + 1)]
    return fading if distance(table, fading, target) < distance(table, growing, target) else growing


def distance(table: Table, path: list[Point], target: float) -> float:
    return abs(float(sum(table[point] for point in reversed(path))) / len(path) - target)


@pytest.mark.parametrize("seed", range(6))
def test_the_walk_is_that_of_the_recursive_definition(seed: int) -> None:
    table = np.random.default_rng(seed).random((7, 7))  # the recursion would take 2^40 steps for 21
    for target in (0.0, 0.4, 0.6):
        paths = [recurse(table, target, i, 0) for i in range(1, 7)]
        assert find_path(table, target) == min(paths, key=lambda path: distance(table, path, target))


def test_the_walk_moves_by_quarter_severities_and_keeps_its_mean() -> None:
    path = walk(MATRIX, "fog", "snow", target=0.4)
    assert path[0][1] == 0 and path[-1][0] == 0 and all(i > 0 for i, _j in path[:-1])
    assert all((i - a, b - j) in {(1, 0), (0, 1)} for (i, j), (a, b) in pairwise(path))
    assert np.mean([MATRIX["fog", "snow"][point] for point in path]) == pytest.approx(0.4, abs=0.01)


def test_equal_choices_strengthen_the_second() -> None:
    assert find_path(np.full((21, 21), 0.25), 0.5) == [*((1, j) for j in range(21)), (0, 20)]


def test_a_walk_through_the_only_points_at_the_target() -> None:
    """Along a staircase of 0.5 in a table of zeros, all of whose other walks are farther from the target."""
    stairs = [(4, 0), (4, 1), (3, 1), (3, 2), (2, 2), (2, 3), (1, 3), (1, 4), (0, 4)]
    table = np.zeros((21, 21))
    for point in stairs:
        table[point] = 0.5
    assert find_path(table, 0.5) == stairs


def test_the_matrix_takes_the_published_keys() -> None:
    matrix = AccuracyMatrix({"n1_jpeg_n2_gaussian_noise": np.full((21, 21), 0.5)}, num_classes=1000)
    assert matrix.pairs == [("jpeg_compression", "gaussian_noise")]
    with pytest.raises(ConfigError):
        matrix["fog", "snow"]


@pytest.mark.parametrize(
    "tables, error, message",
    [
        ({"fog": np.zeros((21, 21))}, ConfigError, "expected a pair.*got 'fog'"),
        ({("fog", "rain"): np.zeros((21, 21))}, ConfigError, "unknown corruption 'rain'"),
        ({("fog", "fog"): np.zeros((21, 21))}, ConfigError, "'fog' twice"),
        ({("fog", "snow"): np.zeros((6, 6))}, InputError, r"\(6, 6\); expected \(21, 21\)"),
        ({("fog", "snow"): np.full((21, 21), 40)}, InputError, "from 40 to 40; expected 0 to 1: divide"),
        ({("fog", "snow"): np.full((21, 21), np.nan)}, InputError, "expected 0 to 1"),
    ],
)
def test_wrong_matrices(tables: dict[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AccuracyMatrix(tables, num_classes=10)


class Brightness(nn.Module):
    """Three classes by the mean value; counts its calls, and stops at a given one."""

    def __init__(self, scale: float = 1.0, stop_at: int | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.num_calls, self.stop_at = [0], stop_at  # a list, which copies share

    def __deepcopy__(self, memo: dict[int, Any]) -> "Brightness":
        copied = Brightness(self.scale.item(), self.stop_at)
        copied.num_calls = self.num_calls
        return copied

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls[0] += 1
        if self.num_calls[0] == self.stop_at:
            raise KeyboardInterrupt
        mean = self.scale * x.mean(dim=(1, 2, 3))
        return -(mean[:, None] - torch.tensor([0.3, 0.5, 0.7])).abs()


def predict(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    logits: Tensor = Brightness()(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255)
    classes: NDArray[np.int64] = logits.argmax(dim=1).numpy()
    return classes


def test_accuracies_are_those_of_the_corruptions_in_turn() -> None:
    data = make_data(6, seed=2)
    matrix = measure_accuracy(Brightness(), data, num_images=None, batch_size=4)
    table = matrix["brightness", "contrast"]
    clean = random_images(6, 8, 8)
    assert matrix.num_classes == 3
    assert table[0, 0] == matrix.clean_accuracy == np.mean(predict(clean) == data.labels)
    for i, j in ((9, 0), (0, 14), (9, 14)):
        pixels = ctta.data.corruptions.corrupt(clean, "brightness", i / 4, seed=2)
        pixels = ctta.data.corruptions.corrupt(pixels, "contrast", j / 4, seed=2)
        assert table[i, j] == np.mean(predict(pixels) == data.labels)
    assert matrix.pairs == [("brightness", "contrast")]  # the other order was not asked for
    stream = in_memory(clean, data.labels, name="small")
    assert measure_accuracy(Brightness(), stream, num_images=4).clean_accuracy in {0, 0.25, 0.5, 0.75, 1}


def test_a_killed_measurement_continues(tmp_path: Path) -> None:
    data, pair = make_data(4), ("brightness", "contrast")
    expected = measure_accuracy(Brightness(), data)[pair]
    with pytest.raises(KeyboardInterrupt):  # in the third of 21 rows
        measure_accuracy(Brightness(stop_at=50), data, folder=tmp_path)[pair]
    net = Brightness()
    np.testing.assert_array_equal(measure_accuracy(net, data, folder=tmp_path)[pair], expected)
    assert net.num_calls[0] == 1 + 19 * 21  # one to learn the number of classes
    again = Brightness()
    np.testing.assert_array_equal(measure_accuracy(again, data, folder=tmp_path)[pair], expected)
    assert again.num_calls[0] == 1


def test_a_folder_of_other_measurements_is_refused(tmp_path: Path) -> None:
    measure_accuracy(Brightness(), make_data(4), folder=tmp_path)
    with pytest.raises(ConfigError, match="network: "):
        measure_accuracy(Brightness(2.0), make_data(4), folder=tmp_path)
    with pytest.raises(ConfigError, match="data: small"):
        measure_accuracy(Brightness(), make_data(5), num_images=4, folder=tmp_path)
    with pytest.raises(ConfigError, match="num_images: 4"):
        measure_accuracy(Brightness(), make_data(4), num_images=3, folder=tmp_path)


@pytest.mark.parametrize("content", [b"no array", np.full((21, 21), 2.0), np.zeros(3), np.zeros((21, 21), np.int64)])
def test_a_damaged_file_is_named(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "fog+snow.npy"
    matrix = measure_accuracy(Brightness(), make_data(4), folder=tmp_path)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(DataError, match=r"fog\+snow"):
        matrix["fog", "snow"]


def test_images_without_labels_or_without_clean_versions() -> None:
    with pytest.raises(DataError):
        measure_accuracy(Brightness(), in_memory(random_images(4, 8, 8), name="unlabeled"))
    published: Any = object.__new__(CifarC)
    for use in (lambda: measure_accuracy(Brightness(), published), lambda: ccc(published, MATRIX)):
        with pytest.raises(TypeError, match="CifarC"):
            use()


def make_stream(**settings: Any) -> Any:
    defaults: dict[str, Any] = {"target": 0.4, "noises": NAMES, "speed": 20, "num_images": 1000, "batch_size": 8}
    return ccc(make_data(), MATRIX, **(defaults | settings))


def test_a_stream_follows_one_walk_after_the_other() -> None:
    stream = make_stream()
    assert len(stream.segments) == 50 and len(stream) == 50 * 3
    steps = [segment.images.corruptions for segment in stream.segments]
    pairs = list(dict.fromkeys((first, second) for (first, _), (second, _) in steps))
    assert all(second == first for (_, second), (first, _) in pairwise(pairs))  # what has grown fades next
    assert all(first != second and {first, second} <= set(NAMES) for first, second in pairs)
    path = walk(MATRIX, *pairs[0], target=0.4)
    expected = [(i / 4, j / 4) for i, j in path]
    assert [(first[1], second[1]) for first, second in steps[: len(path)]] == expected
    assert stream.domains[0] == f"{pairs[0][0]} {path[0][0] / 4:g} + {pairs[0][1]} 0"
    assert len(pairs) > 1


def test_images_are_drawn_anew_at_every_point() -> None:
    stream = make_stream()
    rows = [segment.rows[:].tolist() for segment in stream.segments]
    assert all(len(set(each)) == 20 and set(each) <= set(range(30)) for each in rows)
    assert rows[0] != rows[1]
    assert len({segment.images.name for segment in stream.segments}) == 50
    more = make_stream(speed=70).segments[0].rows[:]
    assert sorted(more[:60]) == sorted([*range(30), *range(30)])  # every image before any comes again
    assert len(more) == 70


def test_a_stream_is_deterministic_and_resumes() -> None:
    stream, same = make_stream(num_images=60), make_stream(num_images=60)
    batches = list(stream)
    assert [len(batch.x) for batch in batches] == [8, 8, 4] * 3
    same.position = 4
    for expected, batch in zip(batches[4:], same, strict=True):
        assert batch.domain == expected.domain and torch.equal(batch.x, expected.x)
        assert torch.equal(batch.index, expected.index) and torch.equal(batch.y, expected.y)
    assert same.hash == stream.hash
    others = (make_stream(num_images=60, **change) for change in ({"seed": 44}, {"target": 0.6}, {"batch_size": 9}))
    assert len({stream.hash, *(other.hash for other in others)}) == 4


def test_the_hash_of_an_endless_stream_depends_on_accuracies_and_target() -> None:
    other = AccuracyMatrix({pair: 0.9 * MATRIX[pair] for pair in MATRIX.pairs}, num_classes=10)
    streams = [ccc(make_data(), matrix, target=0.4, noises=NAMES) for matrix in (MATRIX, MATRIX, other)]
    assert streams[0].hash == streams[1].hash != streams[2].hash
    assert ccc(make_data(), MATRIX, target=0.4001, noises=NAMES).hash != streams[0].hash, "its name rounds the target"


def test_an_endless_stream_begins_like_a_finite_one_and_has_a_position() -> None:
    endless, finite = make_stream(num_images=None), make_stream(num_images=100)
    for expected, batch in zip(finite, islice(endless, 7), strict=False):
        assert batch.domain == expected.domain and torch.equal(batch.x, expected.x)
    assert endless.position == 7
    seventh = next(iter(endless))
    assert torch.equal(seventh.x, finite.read_batch(7).x) and torch.equal(seventh.x, endless.read_batch(7).x)
    endless.position = 3 * 10_000 + 2
    assert len(next(iter(endless)).x) == 4
    assert not hasattr(endless, "__len__")
    with pytest.raises(ConfigError):
        ctta.evaluate(Brightness(), endless)


def test_difficulties_choose_targets_and_noises() -> None:
    every = AccuracyMatrix({pair: MATRIX["fog", "snow"] for pair in permutations(NOISES["easy"], 2)}, num_classes=10)
    for name, target in (("easy", 0.520), ("medium", 0.309), ("hard", 0.099)):  # clean 0.9, chance 0.1
        assert f"ccc {name} target={target:.3f} speed" in ccc(make_data(), every, target=name, num_images=1).name  # type: ignore[call-overload]
    assert [len(NOISES[name]) for name in ("easy", "medium", "hard")] == [14, 13, 4]
    assert not any("brightness" in names for names in NOISES.values())
    with pytest.raises(ConfigError):
        make_stream(target="harder")
    with pytest.raises(ConfigError):
        make_stream(target=40)
    with pytest.raises(ConfigError):
        make_stream(noises="fog")


def test_only_the_pairs_on_the_way_are_measured() -> None:
    matrix = measure_accuracy(Brightness(), make_data(), num_images=2)
    stream = ccc(make_data(), matrix, target=0.5, noises=("brightness", "contrast", "saturate"), speed=5, num_images=20)
    domains: list[Any] = [segment.images for segment in stream.segments]
    assert len(matrix.pairs) == len({tuple(name for name, _ in each.corruptions) for each in domains}) <= 2


def test_measuring_every_pair() -> None:
    matrix = measure_accuracy(Brightness(), make_data(), noises=("brightness", "contrast"), num_images=1)
    assert matrix.pairs == [("brightness", "contrast"), ("contrast", "brightness")]
