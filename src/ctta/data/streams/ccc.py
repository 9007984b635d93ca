"""CCC, Continuously Changing Corruptions, for any network and any images: an endless walk at one mean difficulty."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Literal, TypedDict, Unpack, cast, get_args, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctta.core.validation import check_choice, check_fraction, check_integer
from ctta.data.corruptions.registry import check_severity
from ctta.data.datasets.clean import CleanDataset, CorruptionLevel, format_corruptions
from ctta.data.streams.accuracy import QUARTERS, AccuracyMatrix, AccuracyTable, Pair, check_noises
from ctta.data.streams.sequences import as_clean_dataset
from ctta.data.streams.stream import Batch, Segment, Stream
from ctta.errors import ConfigError

#: Quarter severities of the corruption that fades and of the one that grows.
Point = tuple[int, int]


def walk(matrix: AccuracyMatrix, first: str, second: str, *, target: float) -> list[Point]:
    """Return the way from one corruption to another whose mean accuracy is near a target.

    It starts at (i, 0), where only the first corruption acts, with any i from 1 to 20; each step lessens the first by
    a quarter severity or strengthens the second by one; and it ends where the first is gone. From every point the walk
    takes the step after which the mean accuracy of the rest, this point included, is nearer to the target, and
    strengthens the second if both are equal. Of the twenty starts, that is chosen whose walk has the mean nearest to
    the target. So it is the mean that is near, and not each point.

    Args:
        matrix: Accuracies of a network, see :func:`ctta.data.streams.measure_accuracy`.
        first: Corruption that fades.
        second: Corruption that grows.
        target: Mean accuracy, from 0 to 1.

    Returns:
        The points as quarter severities (i, j): (9, 6) is ``first`` at 2.25 and ``second`` at 1.5.

    Reference: Press et al., "RDumb: a simple approach that questions our progress in continual test-time adaptation",
    NeurIPS 2023.
    """
    check_fraction("target", target)
    return find_path(matrix[first, second], target)


def find_path(table: AccuracyTable, target: float) -> list[Point]:
    """Return the walk over one table of accuracies; see :func:`walk`.

    The best rest of a walk depends only on where it begins, so it is found from the end, one point after the other.

    >>> [len(find_path(np.full((21, 21), accuracy), 0.4)) for accuracy in (0.3, 0.4)]
    [22, 22]
    """
    size = len(table)
    # Sum of the accuracies of the rest of the walk from each point, its number of points, and whether j grows next.
    total, length, grows = table.astype(np.float64), np.ones(table.shape, np.int64), np.zeros(table.shape, bool)
    for j in reversed(range(size)):
        for i in range(1, size):  # at i = 0 the walk ends
            options = [(i, j + 1), (i - 1, j)] if j + 1 < size else [(i - 1, j)]
            means = [(total[option] + table[i, j]) / (length[option] + 1) for option in options]
            best = options[_find_nearest(means, target)]
            grows[i, j] = best != (i - 1, j)
            total[i, j], length[i, j] = total[best] + table[i, j], length[best] + 1
    start = 1 + _find_nearest(total[1:, 0] / length[1:, 0], target)
    path = [(start, 0)]
    while path[-1][0] > 0:
        i, j = path[-1]
        path.append((i, j + 1) if grows[i, j] else (i - 1, j))
    return path


def _find_nearest(means: ArrayLike, target: float) -> int:
    """Return the index of the mean nearest to the target, the first of equal ones; sums that round are equal."""
    return int(np.argmin(np.round(np.abs(np.asarray(means) - target), 12)))


Difficulty = Literal["easy", "medium", "hard"]
DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)

_NOISE = ("gaussian_noise", "shot_noise", "impulse_noise")
_MEDIUM = (
    *_NOISE,
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "frost", "fog", "contrast"),
    *("elastic_transform", "pixelate"),
)
#: The published corruptions of each difficulty. Brightness is in none of them, as networks are too robust to it.
NOISES: dict[Difficulty, tuple[str, ...]] = {
    "easy": (*_MEDIUM, "jpeg_compression"),
    "medium": _MEDIUM,
    "hard": (*_NOISE, "contrast"),
}
#: The published targets, and what they were for: the accuracy of ResNet-50 on clean images and its number of classes.
TARGETS: dict[Difficulty, float] = {"easy": 0.4, "medium": 0.2, "hard": 0.0}
RESNET50_ACCURACY, RESNET50_CLASSES = 0.7613, 1000

#: Images at one point of the walk: 1,000 (the fastest published change), 2,000 or 5,000.
SPEED = 1000


def resolve_target(target: Difficulty, clean_accuracy: float, num_classes: int) -> float:
    """Return the mean accuracy that "easy", "medium" or "hard" stands for.

    The published targets are 40, 20 and 0 % for a ResNet-50 with 76.13 % on clean images of 1,000 classes. For another
    network the target is at the same fraction of the way from guessing to its own accuracy on clean images.

    >>> [round(resolve_target(name, 0.7613, 1000), 4) for name in DIFFICULTIES]
    [0.4, 0.2, 0.0]
    >>> [round(resolve_target(name, 0.9, 10), 2) for name in DIFFICULTIES]
    [0.52, 0.31, 0.1]
    """
    check_choice("target", target, DIFFICULTIES)
    chance = 1 / RESNET50_CLASSES
    fraction = (TARGETS[target] - chance) / (RESNET50_ACCURACY - chance)
    return float(np.clip(1 / num_classes + fraction * (clean_accuracy - 1 / num_classes), 0, 1))


class EndlessStream:
    """Batches of CCC without an end; created by :func:`ccc` without a number of images.

    Iterating continues from ``position``, the number of batches yielded so far, also after a ``break``. To resume, set
    ``position`` to its earlier value. There is no ``len``. The walks are found as far as they are needed.

    Args:
        name: The protocol and its settings.
        data: The images.
        matrix: Accuracies of a network.
        noises: The corruptions to walk between.
        target: Mean accuracy of each walk.
        speed: Images at each point of a walk.
        seed: Seed of the sequence of corruptions and of the images.
        batch_size: Images per batch; a batch never spans two points.
    """

    def __init__(
        self,
        name: str,
        data: CleanDataset,
        matrix: AccuracyMatrix,
        *,
        noises: tuple[str, ...],
        target: float,
        speed: int,
        seed: int,
        batch_size: int,
    ) -> None:
        self.name, self.data, self.matrix, self.noises, self.target = name, data, matrix, noises, target
        self.speed, self.seed, self.batch_size = speed, seed, check_integer("batch_size", batch_size, 1)
        self._position, self._batches_per_point = 0, -(-speed // self.batch_size)
        self._walks: dict[Pair, list[Point]] = {}
        self._points: list[tuple[CorruptionLevel, CorruptionLevel]] = []
        self._found = self._find_points()

    @property
    def position(self) -> int:
        """Number of batches yielded since the start; set it to resume."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position = check_integer("position", value, 0)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of the labels; empty if the dataset does not name them."""
        return self.data.class_names

    def __iter__(self) -> Iterator[Batch]:
        while True:
            number, inside = divmod(self._position, self._batches_per_point)
            part = self._open(number)
            part.position = inside
            for batch in part:
                self._position += 1
                yield batch

    def read_batch(self, batch_index: int) -> Batch:
        """Read one batch, independently of the position.

        Args:
            batch_index: Index of the batch in the stream, from 0.

        Returns:
            The batch.
        """
        number, inside = divmod(check_integer("batch_index", batch_index, 0), self._batches_per_point)
        return self._open(number).read_batch(inside)

    @property
    def hash(self) -> str:
        """Hash of everything that decides which batches are yielded: images, settings and the accuracy matrix."""
        identity = f"{self.data.content} {self.name} {self.target!r} {self.matrix.identity}"
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def _take(self, num_images: int) -> Stream:
        """Return a stream of the first images."""
        sizes = [min(self.speed, num_images - start) for start in range(0, num_images, self.speed)]
        segments = [self._segment(number, size) for number, size in enumerate(sizes)]
        return self._make_stream(f"{self.name} images={num_images}", segments)

    def _open(self, number: int) -> Stream:
        return self._make_stream(self.name, [self._segment(number, self.speed)])

    def _make_stream(self, name: str, segments: list[Segment]) -> Stream:
        return Stream(name, segments, batch_size=self.batch_size, read_ahead=self.data.read_ahead)

    def _segment(self, number: int, num_images: int) -> Segment:
        """Return images at a point of the walk, with draws of their own."""
        self._points.extend(islice(self._found, max(0, number + 1 - len(self._points))))
        levels = tuple((name, check_severity(severity)) for name, severity in self._points[number])
        rows = _draw_rows((self.seed, number), len(self.data), num_images)
        return Segment(format_corruptions(levels), self.data.combine(*levels, visit=number), rows)

    def _find_points(self) -> Iterator[tuple[CorruptionLevel, CorruptionLevel]]:
        generator = np.random.default_rng(self.seed)
        first = self.noises[generator.integers(len(self.noises))]
        while True:
            others = [name for name in self.noises if name != first]
            second = others[generator.integers(len(others))]
            if (first, second) not in self._walks:
                self._walks[first, second] = walk(self.matrix, first, second, target=self.target)
            for i, j in self._walks[first, second]:
                yield (first, QUARTERS[i]), (second, QUARTERS[j])
            first = second

    def __repr__(self) -> str:
        return f"EndlessStream({self.name!r}, {self._position} batches of {self.batch_size} so far)"


@lru_cache(maxsize=8)  # an endless stream opens the same segments again and again
def _draw_rows(seed: tuple[int, ...], size: int, count: int) -> NDArray[np.int64]:
    """Return images in random order; every one of them comes before any comes again."""
    generator = np.random.default_rng(seed)
    rows = np.concatenate([generator.permutation(size) for _ in range(-(-count // size))])[:count].copy()
    rows.setflags(write=False)
    return rows


class _Settings(TypedDict, total=False):
    """The keywords of :func:`ccc` that do not decide what it returns."""

    target: float | Difficulty
    noises: Sequence[str] | None
    speed: int
    seed: int
    batch_size: int


@overload
def ccc(
    data: CleanDataset | Stream, matrix: AccuracyMatrix, *, num_images: int, **settings: Unpack[_Settings]
) -> Stream: ...
@overload
def ccc(
    data: CleanDataset | Stream, matrix: AccuracyMatrix, *, num_images: None = None, **settings: Unpack[_Settings]
) -> EndlessStream: ...
def ccc(
    data: CleanDataset | Stream,
    matrix: AccuracyMatrix,
    *,
    target: float | Difficulty = "easy",
    noises: Sequence[str] | None = None,
    speed: int = SPEED,
    seed: int = 43,
    num_images: int | None = None,
    batch_size: int = 64,
) -> Stream | EndlessStream:
    """Return a stream in which one corruption turns into the next, and so on, at one mean accuracy of the network.

    At each point of :func:`walk` come ``speed`` images in random order under both corruptions, with random draws of
    their own. Where a walk ends, the corruption that has grown becomes the one that fades, and another is drawn; its
    severity may jump there. The images are taken as they are: CCC itself also crops and flips them at random and saves
    them as JPEG.

    Args:
        data: Clean images with labels: a dataset such as :class:`.ArrayDataset`, or a stream of clean images.
        matrix: Accuracies of the network that the difficulty is for, see :func:`measure_accuracy`.
        target: "easy", "medium" or "hard", relative to the network as :func:`resolve_target` says, or the mean accuracy
            of the walks, from 0 to 1.
        noises: Corruptions to walk between; by default those published for the difficulty, and those of "easy" for a
            number.
        speed: Images at each point; 1,000, 2,000 and 5,000 are the published ones.
        seed: Seed of the sequence of corruptions and of the order of images; 43, 44 and 45 are the published ones.
        num_images: Length of the stream; None for one without an end.
        batch_size: Images per batch; a batch never spans two points.

    Returns:
        The stream.

    Raises:
        ConfigError: A setting is out of range, or the matrix lacks a pair.
        TypeError: The data is neither a dataset of clean images nor a stream, or the matrix is no accuracy matrix.
    """
    images = as_clean_dataset(data, "ccc")
    if not isinstance(matrix, AccuracyMatrix):
        raise TypeError(
            f"matrix must be what measure_accuracy returns, or an AccuracyMatrix, got a {type(matrix).__name__}: wrap "
            "tables in AccuracyMatrix(tables, num_classes=1000)"
        )
    if noises is None:
        names = NOISES.get(cast("Difficulty", target), NOISES["easy"])
    elif len(names := tuple(dict.fromkeys(check_noises(noises)))) < 2:
        raise ConfigError(f"expected at least two corruptions to walk between, such as ('fog', 'snow'), got {noises!r}")
    if isinstance(target, str):
        accuracy = resolve_target(target, matrix.clean_accuracy, matrix.num_classes)
    else:
        check_fraction("target", target)
        accuracy = float(target)
    speed, seed = check_integer("speed", speed, 1), check_integer("seed", seed, 0)
    chosen = "" if noises is None else f" noises={'+'.join(names)}"
    named = f"{target} " if isinstance(target, str) else ""
    name = f"{images.name} ccc {named}target={accuracy:.3f}{chosen} speed={speed} order={seed} batch={batch_size}"
    stream = EndlessStream(
        name, images, matrix, noises=names, target=accuracy, speed=speed, seed=seed, batch_size=batch_size
    )
    return stream if num_images is None else stream._take(check_integer("num_images", num_images, 1))
