"""Score boxes against the truth as COCO does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ctta.detection.boxes import Boxes, box_area, move_boxes
from ctta.errors import InputError
from ctta.evaluation.intervals import Interval
from ctta.nn.surgery import find_weight

#: The overlaps at which COCO scores, and the recalls at which it reads the precision.
OVERLAPS, RECALLS = np.linspace(0.5, 0.95, 10), np.linspace(0.0, 1.0, 101)
#: How many boxes of an image and class count.
MAX_DETECTIONS = 100


@dataclass(frozen=True)
class BoxScores:
    """Mean average precision, from 0 to 100; NaN where nothing is to be found.

    Attributes:
        map50: At an overlap of 0.5.
        map: The mean over overlaps from 0.5 to 0.95, which is COCO's score.
        by_class: ``map50`` of each class.
    """

    map50: float
    map: float
    by_class: Mapping[int, float]


def score_boxes(found: Sequence[Boxes], targets: Sequence[Boxes]) -> BoxScores:
    """Return the mean average precision of boxes, by the evaluator of COCO; needs the extra ``detect``.

    Args:
        found: The boxes of each image, low scores too; the best hundred of each count.
        targets: What there is to be found in each image.

    Returns:
        The scores.

    Raises:
        InputError: There is not one target for each image, or nothing to be found.
        ImportError: pycocotools is not installed.
    """
    return BoxMatches(found, targets).score()


class BoxMatches:
    """Which boxes of images are right, as COCO's evaluator decides; scored for all images, or for draws of them.

    Args:
        found: The boxes of each image.
        targets: What there is to be found in each image.
    """

    def __init__(self, found: Sequence[Boxes], targets: Sequence[Boxes]) -> None:
        if len(found) != len(targets) or not any(len(each["boxes"]) for each in targets):
            raise InputError(f"expected as many targets with boxes as images, got {len(targets)} for {len(found)}")
        try:
            from pycocotools.coco import COCO
            from pycocotools.cocoeval import COCOeval
        except ImportError as error:
            raise ImportError("scoring boxes needs pycocotools: pip install 'ctta[detect]'") from error
        cpu = torch.device("cpu")
        found, targets = move_boxes(found, cpu), move_boxes(targets, cpu)
        labels = torch.cat([each["labels"] for each in (*found, *targets)]).unique().tolist()
        truth = COCO()
        truth.dataset = {
            "images": [{"id": number} for number in range(len(targets))],
            "categories": [{"id": label} for label in labels],
            "annotations": [{"id": number, **entry} for number, entry in enumerate(_list_entries(targets), start=1)],
        }
        with redirect_stdout(StringIO()):
            truth.createIndex()
            entries = _list_entries(found)
            results = truth.loadRes(entries) if entries else COCO()
            evaluation = COCOeval(truth, results, "bbox")
            evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, float("inf")]], ["all"]
            evaluation.params.maxDets = [MAX_DETECTIONS]
            evaluation.evaluate()
        self.num_images = len(targets)
        rows = np.array(evaluation.evalImgs, object).reshape(len(labels), -1)  # by class, then by image
        self.classes = {label: _join_images(row) for label, row in zip(labels, rows, strict=True)}

    def score(self, weights: NDArray[np.float64] | None = None) -> BoxScores:
        """Return the scores.

        Args:
            weights: How often each image counts; once by default.
        """
        if weights is None:
            weights = np.ones(self.num_images)
        precision = {label: each.average_precision(weights) for label, each in self.classes.items()}
        known = {label: each for label, each in precision.items() if each is not None}
        values = np.array(list(known.values())).reshape(-1, len(OVERLAPS))
        return BoxScores(
            map50=100 * float(values[:, 0].mean()) if len(values) else float("nan"),
            map=100 * float(values.mean()) if len(values) else float("nan"),
            by_class={label: 100 * float(each[0]) for label, each in known.items()},
        )


@dataclass(frozen=True)
class _ClassMatches:
    """The boxes of one class, by descending score.

    Attributes:
        image: The image of each (D).
        is_right: At each overlap (overlaps, D).
        counts: Whether each counts: those in crowds do not (overlaps, D).
        num_objects: The number of objects in each image (N).
    """

    image: NDArray[np.int64]
    is_right: NDArray[np.bool_]
    counts: NDArray[np.bool_]
    num_objects: NDArray[np.int64]

    def average_precision(self, weights: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Return the mean precision over recall at each overlap; None if there are no objects."""
        total = float(self.num_objects @ weights)
        if total == 0:
            return None
        counted = self.counts * weights[self.image]
        right = np.cumsum(counted * self.is_right, axis=1)
        seen = np.cumsum(counted, axis=1)
        recall = right / total
        precision = np.divide(right, seen, out=np.zeros_like(right), where=seen > 0)
        envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        means = []
        for at, values in zip(recall, envelope, strict=True):
            places = np.searchsorted(at, RECALLS, side="left")
            means.append(np.where(places < len(values), np.append(values, 0.0)[places], 0.0).mean())
        return np.array(means)


def _join_images(rows: Iterable[dict[str, Any] | None]) -> _ClassMatches:
    """Return the boxes of a class from what COCO's evaluator says about each image."""
    rows = list(rows)
    known = [(number, row) for number, row in enumerate(rows) if row is not None]
    num_objects = np.zeros(len(rows), np.int64)
    for number, row in known:
        num_objects[number] = (np.asarray(row["gtIgnore"]) == 0).sum()
    scores = np.concatenate([np.asarray(row["dtScores"], np.float64) for _, row in known] or [np.zeros(0)])
    order = np.argsort(-scores, kind="mergesort")  # as the evaluator sorts, so that equal scores keep their order

    def join(name: str) -> NDArray[Any]:
        found = [np.asarray(row[name]).reshape(len(OVERLAPS), -1) for _, row in known]
        return np.concatenate(found or [np.zeros((len(OVERLAPS), 0))], 1)[:, order]

    image = np.concatenate([np.full(len(row["dtScores"]), number) for number, row in known] or [np.zeros(0, np.int64)])
    return _ClassMatches(image[order].astype(np.int64), join("dtMatches") > 0, join("dtIgnore") == 0, num_objects)


def _list_entries(images: Sequence[Boxes]) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for number, each in enumerate(images):
        corners, areas = each["boxes"].double(), box_area(each["boxes"].double()).tolist()
        sizes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
        scores = each["scores"].tolist() if "scores" in each else [1.0] * len(areas)
        crowd = each["crowd"].int().tolist() if "crowd" in each else [0] * len(areas)
        names = ("category_id", "bbox", "area", "score", "iscrowd")
        for values in zip(each["labels"].tolist(), sizes, areas, scores, crowd, strict=True):
            entries.append({"image_id": number, **dict(zip(names, values, strict=True))})
    return entries


@dataclass(frozen=True)
class DetectionRun:
    """What a model found on a stream.

    Attributes:
        found: The boxes of each image.
        targets: What was to be found.
        domains: The name of the domain of each image.
    """

    found: Sequence[Boxes]
    targets: Sequence[Boxes]
    domains: Sequence[str]

    def score(self, domain: str | None = None) -> BoxScores:
        """Return the scores on all images, or on those of a domain."""
        rows = [number for number, name in enumerate(self.domains) if domain in (None, name)]
        return score_boxes([self.found[row] for row in rows], [self.targets[row] for row in rows])

    def score_windows(self, size: int) -> list[float]:
        """Return the mean average precision at an overlap of 0.5 over windows of a number of images."""
        starts = range(0, len(self.found), size)
        return [
            score_boxes(self.found[at : at + size], self.targets[at : at + size]).map50
            for at in starts
            if any(len(each["boxes"]) for each in self.targets[at : at + size])
        ]


def run_detection(
    models: Mapping[str, Callable[[Tensor], Sequence[Boxes]]],
    batches: Iterable[tuple[Tensor, Sequence[Boxes], str]],
) -> dict[str, DetectionRun]:
    """Let models take turns on every batch of a stream, and return what each has found.

    Args:
        models: Models of :func:`ctta.detect` on any device, or other functions of images, by name.
        batches: Images, the boxes to be found in each, and the name of the domain.

    Returns:
        The run of each model.
    """
    found: dict[str, list[Boxes]] = {name: [] for name in models}
    targets: list[Boxes] = []
    domains: list[str] = []
    for x, truth, domain in batches:
        for name, model in models.items():
            device = find_weight(model).device if isinstance(model, nn.Module) else x.device
            found[name] += move_boxes(model(x.to(device, non_blocking=True)), torch.device("cpu"))
        targets += truth
        domains += [domain] * len(x)
    return {name: DetectionRun(each, targets, domains) for name, each in found.items()}


@dataclass(frozen=True)
class DetectionEstimate:
    """Mean scores over domains, with intervals over images.

    Attributes:
        map50: Mean average precision at an overlap of 0.5.
        map: The mean over overlaps from 0.5 to 0.95.
        difference: ``map50`` above that of the first run.
    """

    map50: Interval
    map: Interval
    difference: Interval


def estimate_scores(
    runs: Mapping[str, DetectionRun], domains: Sequence[str], *, num_resamples: int = 200, seed: int = 0
) -> dict[str, DetectionEstimate]:
    """Return mean scores over domains, with 95 % intervals over which images there were (bootstrap).

    Images are drawn with replacement, the same for every run, and the same in each domain, which usually shows the same
    images. What made a stream hard in another way, such as its order, the intervals do not cover.

    Args:
        runs: The runs on one stream; differences are those from the first.
        domains: The domains that count.
        num_resamples: How many times images are drawn.
        seed: Seed of the draws.

    Returns:
        The estimates by run.
    """
    scores: dict[str, NDArray[np.float64]] = {}
    for name, run in runs.items():
        generator, totals = np.random.default_rng(seed), np.zeros((num_resamples + 1, 2))
        draws: dict[int, NDArray[np.float64]] = {}
        for domain in domains:
            rows = [row for row, each in enumerate(run.domains) if each == domain]
            matches, count = BoxMatches([run.found[row] for row in rows], [run.targets[row] for row in rows]), len(rows)
            if count not in draws:
                drawn = generator.multinomial(count, np.full(count, 1 / count), size=num_resamples)
                draws[count] = np.concatenate([np.ones((1, count)), drawn])
            found = [matches.score(weights) for weights in draws[count]]
            totals += np.array([[each.map50, each.map] for each in found]) / len(domains)
        scores[name] = totals
    first = next(iter(scores.values()))

    def describe(values: NDArray[np.float64]) -> Interval:
        low, high = np.nanquantile(values[1:], [0.025, 0.975])
        return Interval(float(values[0]), float(low), float(high), len(rows), 1)

    return {
        name: DetectionEstimate(describe(each[:, 0]), describe(each[:, 1]), describe(each[:, 0] - first[:, 0]))
        for name, each in scores.items()
    }
