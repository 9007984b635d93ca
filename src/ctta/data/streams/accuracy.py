"""How accurate a network is under pairs of corruptions in quarter severities, which guides the walk of CCC."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ctta.core.validation import check_integer
from ctta.data.corruptions import VERSION
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.base import Rows
from ctta.data.datasets.clean import CleanDataset
from ctta.data.streams.sequences import as_clean_dataset
from ctta.data.streams.stream import Stream
from ctta.errors import ConfigError, DataError, InputError
from ctta.io.atomic import atomic_write
from ctta.io.images import to_unit_floats
from ctta.io.progress import ProgressLines
from ctta.io.provenance import record_settings
from ctta.methods import Source
from ctta.nn.surgery import fingerprint

#: Severities of each corruption: 0, 0.25, 0.5, … 5.
QUARTERS = tuple(step / 4 for step in range(21))
SHAPE = (len(QUARTERS), len(QUARTERS))
SETTINGS_FILE = "made_from.json"

#: The names of two corruptions, in the order in which they are applied.
Pair = tuple[str, str]
#: Accuracy, from 0 to 1, by the quarter severity of the first corruption and that of the second.
AccuracyTable = NDArray[np.float64]

#: Keys of CCC's published file, and the names in it that differ from ours.
_PUBLISHED_KEY = re.compile(r"n1_(?P<first>\w+)_n2_(?P<second>\w+)")
_PUBLISHED_NAMES = {"elastic": "elastic_transform", "jpeg": "jpeg_compression"}


class AccuracyMatrix:
    """The accuracy of a network under pairs of corruptions.

    ``matrix["fog", "snow"][9, 6]`` is the accuracy on images under fog at severity 9 / 4 and then snow at 6 / 4.

    Args:
        tables: Accuracies from 0 to 1, an array (21, 21) for each pair ``("fog", "snow")``, or for each key of CCC's
            published file, ``"n1_fog_n2_snow"``.
        num_classes: Number of classes of the network.

    Raises:
        ConfigError: A key is not a pair of corruptions.
        InputError: An array has another shape, or values that are no accuracies.

    >>> matrix = AccuracyMatrix({"n1_fog_n2_snow": np.full((21, 21), 0.5)}, num_classes=1000)
    >>> matrix.pairs, matrix.clean_accuracy
    ([('fog', 'snow')], 0.5)
    """

    def __init__(self, tables: Mapping[Any, ArrayLike], *, num_classes: int) -> None:
        self.num_classes = check_integer("num_classes", num_classes, 2)
        self._tables = {_parse_pair(key): _check_table(key, table) for key, table in tables.items()}

    @property
    def pairs(self) -> list[Pair]:
        """The pairs that are known so far."""
        return list(self._tables)

    @property
    def clean_accuracy(self) -> float:
        """Accuracy without corruptions."""
        if not self._tables:
            raise InputError("an accuracy matrix without pairs has no accuracy on clean images: give at least one pair")
        return float(next(iter(self._tables.values()))[0, 0])

    @property
    def identity(self) -> str:
        """What decides the accuracies, the same on every machine; part of the hash of an endless stream."""
        digest = hashlib.sha256(str(self.num_classes).encode())
        for pair, table in sorted(self._tables.items()):
            digest.update(repr(pair).encode() + np.ascontiguousarray(table, "<f8").tobytes())
        return digest.hexdigest()

    def __getitem__(self, pair: Pair) -> AccuracyTable:
        if pair not in self._tables:
            known = ", ".join(f"{first} → {second}" for first, second in self._tables)
            raise ConfigError(f"the accuracy matrix does not have {' → '.join(pair)}, only {known}: measure this pair")
        return self._tables[pair]


class MeasuredAccuracy(AccuracyMatrix):
    """An accuracy matrix that measures a pair when it is asked for; created by :func:`measure_accuracy`."""

    def __init__(
        self, net: nn.Module, data: CleanDataset, rows: Rows, *, batch_size: int, folder: Path | None, progress: bool
    ) -> None:
        self.data, self.rows, self.batch_size, self.folder = data, rows, batch_size, folder
        self.progress = progress
        self._model = Source(net)
        self._device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
        pixels, _labels = data.read_clean(rows[:1])
        super().__init__({}, num_classes=self._predict(pixels).shape[1])
        self._settings = {
            "network": fingerprint(net),
            "data": data.content,
            "num_images": len(rows),
            "corruptions": VERSION,
        }
        if folder is not None:
            record_settings(folder / SETTINGS_FILE, self._settings)

    @property
    def identity(self) -> str:
        """What decides the accuracies: the network and the images, whatever has been measured so far."""
        return str(self._settings)

    @property
    def clean_accuracy(self) -> float:
        """Accuracy without corruptions."""
        if self._tables:
            return super().clean_accuracy
        return sum(self._count_correct(*batch[1:]) for batch in self._read_clean()) / len(self.rows)

    def __getitem__(self, pair: Pair) -> AccuracyTable:
        if pair not in self._tables:
            self._tables[pair] = self._measure(pair)
        return self._tables[pair]

    def _measure(self, pair: Pair) -> AccuracyTable:
        """Return the accuracies of a pair; those on disk are not measured again."""
        first, second = _parse_pair(pair)
        path = None if self.folder is None else self.folder / f"{first}+{second}.npy"
        table = _read_partial(path)
        num_forwards = len(self.rows) * len(QUARTERS)
        lines = ProgressLines(f"accuracy under {first}, then {second}") if self.progress else None
        for i, severity in enumerate(QUARTERS):
            if np.isnan(table[i]).any():
                table[i] = self._measure_row((first, severity), second)
                if path is not None:
                    with atomic_write(path) as temporary, temporary.open("wb") as file:
                        np.save(file, table)
            if lines:
                lines.update((i + 1) * num_forwards, len(QUARTERS) * num_forwards)
        return table

    def _measure_row(self, first: tuple[str, float], second: str) -> list[float]:
        """Return the accuracies at one severity of the first corruption, which is applied once for all severities."""
        correct = np.zeros(len(QUARTERS), np.int64)
        for rows, clean, labels in self._read_clean():
            pixels = self.data.corrupt(clean, rows, first)
            for j, severity in enumerate(QUARTERS):
                correct[j] += self._count_correct(self.data.corrupt(pixels, rows, (second, severity)), labels)
        return [count / len(self.rows) for count in correct.tolist()]

    def _read_clean(self) -> Iterator[tuple[Rows, NDArray[np.uint8], Tensor]]:
        for start in range(0, len(self.rows), self.batch_size):
            rows = self.rows[start : start + self.batch_size]
            pixels, labels = self.data.read_clean(rows)
            assert labels is not None  # checked by measure_accuracy
            yield rows, pixels, labels

    def _predict(self, pixels: NDArray[np.uint8]) -> Tensor:
        logits: Tensor = self._model(to_unit_floats(pixels).to(self._device))
        return logits

    def _count_correct(self, pixels: NDArray[np.uint8], labels: Tensor) -> int:
        return int((self._predict(pixels).argmax(dim=1).cpu() == labels).sum())


def measure_accuracy(
    net: nn.Module,
    data: CleanDataset | Stream,
    *,
    noises: Sequence[str] | None = None,
    num_images: int | None = 200,
    batch_size: int = 100,
    folder: str | PathLike[str] | None = None,
    progress: bool = False,
) -> MeasuredAccuracy:
    """Measure how accurate a network is under pairs of corruptions, each at 21 severities: 441 accuracies per pair.

    A pair is measured when it is first asked for, as by :func:`.ccc`, which needs only the pairs on its
    way. With ``folder`` nothing is measured twice, and a process that was killed continues where it was.

    Args:
        net: The network, which predicts in eval mode.
        data: Clean images with labels: a dataset such as :class:`.ArrayDataset`, or a stream of clean images.
            They should not be those of the stream that methods are compared on.
        noises: Corruptions of which every ordered pair is measured now; none by default.
        num_images: Number of images, drawn at random but always the same; None for all. The standard error of an
            accuracy p is √(p (1 - p) / num_images): 3.5 points for 0.5 and 200 images.
        batch_size: Images per forward pass.
        folder: Where to keep what has been measured; created if needed.
        progress: Whether to print a line on standard error at intervals.

    Returns:
        The matrix.

    Raises:
        ConfigError: The folder belongs to another network, other images or another version of the corruptions; or a
            corruption is unknown.
        DataError: The images have no labels, or a file of the folder is damaged.
        TypeError: The data is neither a dataset of clean images nor a stream.

    >>> import ctta
    >>> matrix = ctta.data.streams.measure_accuracy(ctta.models.embedded(), ctta.data.datasets.sample(), num_images=100)
    >>> round(matrix.clean_accuracy, 2) > 0.8, matrix.pairs
    (True, [])
    """
    images = as_clean_dataset(data, "measure_accuracy")
    if images.labels is None or images.labels.ndim != 1:
        raise DataError(f"{images.name} has no label per image to measure accuracy with: use images with a class each")
    count = len(images) if num_images is None else min(check_integer("num_images", num_images, 1), len(images))
    rows = np.sort(np.random.default_rng(0).permutation(len(images))[:count])
    batch_size = check_integer("batch_size", batch_size, 1)
    path = None if folder is None else Path(folder)
    matrix = MeasuredAccuracy(net, images, rows, batch_size=batch_size, folder=path, progress=progress)
    for pair in permutations(check_noises(noises or ()), 2):
        matrix[pair]
    return matrix


def check_noises(noises: Iterable[str]) -> list[str]:
    """Return names of corruptions as a list; raise unless all of them are known."""
    if isinstance(noises, str):
        raise ConfigError(f"noises must be a sequence of corruptions, got {noises!r}")
    names = list(noises)
    for name in names:
        check_corruption(name, 1)
    return names


def _parse_pair(key: Any) -> Pair:
    """Return the two corruptions of a key; raise unless they are known and differ."""
    match = _PUBLISHED_KEY.fullmatch(key) if isinstance(key, str) else None
    names = match.groups() if match else key
    if isinstance(names, str) or len(names) != 2:
        raise ConfigError(f"expected a pair such as ('fog', 'snow') or a key such as 'n1_fog_n2_snow', got {key!r}")
    first, second = check_noises(_PUBLISHED_NAMES.get(name, name) for name in names)
    if first == second:
        raise ConfigError(f"expected two different corruptions, got {first!r} twice")
    return first, second


def _check_table(key: Any, table: ArrayLike) -> AccuracyTable:
    values = np.array(table, np.float64)
    if values.shape != SHAPE:
        raise InputError(
            f"the accuracies of {key!r} have shape {values.shape}; expected {SHAPE}, in quarter severities"
        )
    if not ((values >= 0) & (values <= 1)).all():  # NaN fails too
        raise InputError(
            f"the accuracies of {key!r} are from {values.min():g} to {values.max():g}; expected 0 to 1: divide "
            "percentages by 100"
        )
    return values


def _read_partial(path: Path | None) -> AccuracyTable:
    """Return what has been measured of a pair, with NaN for the rest."""
    if path is None or not path.exists():
        return np.full(SHAPE, np.nan)
    try:
        table: AccuracyTable = np.load(path)  # refuses pickles by default
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} is truncated or not an array ({error}): delete it, and it is measured again"
        ) from error
    known = table[~np.isnan(table)] if table.dtype == np.float64 else None
    if known is None or table.shape != SHAPE or ((known < 0) | (known > 1)).any():
        raise DataError(f"{path} does not hold {SHAPE} accuracies: delete it, and it is measured again")
    return table
