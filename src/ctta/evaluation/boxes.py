"""Score boxes against the truth as COCO does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO

import numpy as np
import torch
from torch import Tensor, nn

from ctta.detection.boxes import Boxes, box_area, move_boxes
from ctta.errors import InputError
from ctta.nn.surgery import find_weight


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
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # overlap, recall, class
    known = np.where(precision > -1, precision, np.nan)
    present = [number for number in range(len(labels)) if not np.isnan(known[0, :, number]).all()]
    by_class = {labels[number]: 100 * float(np.nanmean(known[0, :, number])) for number in present}
    return BoxScores(
        map50=100 * float(np.mean([np.nanmean(known[0, :, number]) for number in present])),
        map=100 * float(np.nanmean(known[:, :, present])),
        by_class=by_class,
    )


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
