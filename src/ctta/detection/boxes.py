"""Boxes: overlap, suppression of duplicates, fusion of several predictions, and fitting images to a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ctta.core.parallel import read
from ctta.functional import at_least_float32

#: Boxes beyond these are not compared with each other: those with the highest scores are kept.
MAX_CANDIDATES = 1000
#: Suppression takes four or five passes in practice; whether all is settled is read after that number.
PASSES_PER_READ = 8
#: The gray of the border around a letterboxed image.
BORDER = 114 / 255


class Boxes(TypedDict):
    """The boxes of one image: what a detector finds, or what it should find.

    Attributes:
        boxes: Left, top, right and bottom in pixels of the image (n, 4).
        labels: Class indices (n), int64.
        scores: How sure the detector is, from 0 to 1 (n), in descending order; targets may have none.
        crowd: Of targets, which are around many objects (n), bool: detections there are neither right nor wrong.
    """

    boxes: Tensor
    labels: Tensor
    scores: NotRequired[Tensor]
    crowd: NotRequired[Tensor]


def box_area(boxes: Tensor) -> Tensor:
    """Return the areas (n) of boxes (n, 4)."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp_min(0).prod(-1)


def box_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of every pair of boxes.

    Args:
        boxes: Left, top, right and bottom (n, 4).
        others: Further boxes (m, 4).

    Returns:
        The overlaps (n, m), from 0 to 1.

    >>> box_iou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[0.0, 0.0, 2.0, 1.0]])).item()
    0.5
    """
    low = torch.maximum(boxes[:, None, :2], others[:, :2])
    high = torch.minimum(boxes[:, None, 2:], others[:, 2:])
    inner = (high - low).clamp_min(0).prod(-1)
    union = box_area(boxes)[:, None] + box_area(others) - inner
    return inner / union.clamp_min(torch.finfo(union.dtype).tiny)


def suppress(found: Sequence[Boxes], max_overlap: float, max_boxes: int) -> list[Boxes]:
    """Return the best boxes of each image, without those that overlap a better one of their class.

    This is non-maximum suppression.

    Args:
        found: Boxes of each image in any order.
        max_overlap: The largest intersection over union that two boxes of a class may have.
        max_boxes: How many boxes of an image to return at most.

    Returns:
        The boxes of each image by descending score.
    """
    candidates = [
        select_boxes(each, each["scores"].argsort(descending=True, stable=True)[:MAX_CANDIDATES]) for each in found
    ]
    most = max(len(each["labels"]) for each in candidates)
    exists = found[0]["labels"].new_zeros(len(found), most, dtype=torch.bool)
    hides = exists.new_zeros(len(found), most, most)
    for row, (boxes, labels) in enumerate((each["boxes"], each["labels"]) for each in candidates):
        exists[row, : len(labels)] = True
        overlaps = box_iou(boxes, boxes) > max_overlap
        hides[row, : len(labels), : len(labels)] = (overlaps & (labels[:, None] == labels)).triu(1)
    kept, is_settled = exists, False
    while not is_settled:  # each pass settles at least the next box of every image
        for _ in range(PASSES_PER_READ):
            before, kept = kept, exists & ~(hides & kept[..., None]).any(1)
        unchanged, counts = read((before == kept).all(), kept.sum(1))
        is_settled = bool(unchanged)
    chosen = [
        each.int().argsort(descending=True, stable=True)[: min(count, max_boxes)]
        for each, count in zip(kept, counts.tolist(), strict=True)
    ]
    return [select_boxes(each, rows) for each, rows in zip(candidates, chosen, strict=True)]


def choose_boxes(boxes: Tensor, scores: Tensor, *, min_score: float, max_overlap: float, max_boxes: int) -> list[Boxes]:
    """Return what a network finds in each image, from the scores of all its boxes for all classes.

    Args:
        boxes: Left, top, right and bottom (N, M, 4).
        scores: Of each box for each class (N, M, classes).
        min_score: Boxes with lower scores are left out.
        max_overlap: See :func:`suppress`.
        max_boxes: How many boxes an image may have.

    Returns:
        The boxes of each image by descending score.
    """
    is_candidate = scores > min_score
    (counts,) = read(is_candidate.sum((1, 2)))
    image, at, label = is_candidate.nonzero(as_tuple=True)
    parts = (each.split(counts.tolist()) for each in (boxes[image, at], label, scores[image, at, label]))
    every = [Boxes(boxes=box, labels=name, scores=score) for box, name, score in zip(*parts, strict=True)]
    return suppress(every, max_overlap, max_boxes)


def fuse_boxes(views: Sequence[Boxes], min_overlap: float = 0.55) -> Boxes:
    """Return weighted means of the boxes that several views of an image have in common (weighted boxes fusion).

    Boxes join, from the highest score down, the mean of their class that they overlap most. The score of a mean is
    that of its boxes times the part of the views that have one.

    Args:
        views: What was found in each view, in pixels of the same image.
        min_overlap: The smallest intersection over union of a box and the mean that it joins.

    Returns:
        The means by descending score.

    Reference: Solovyev, Wang, Gabruseva, "Weighted boxes fusion", Image and Vision Computing 2021.
    """
    device = views[0]["boxes"].device
    views = move_boxes(views, torch.device("cpu"))  # as there is a decision for each box
    boxes, scores, labels = (torch.cat([view[name] for view in views]) for name in ("boxes", "scores", "labels"))
    order = scores.argsort(descending=True, stable=True)
    order = order[scores[order] > 0]  # others have no weight
    boxes, scores, labels = boxes[order], scores[order], labels[order]
    means, sums, counts = torch.empty_like(boxes), torch.zeros_like(boxes), torch.zeros_like(labels)
    totals, mean_labels, num_means = torch.zeros_like(scores), torch.full_like(labels, -1), 0
    for box, score, label in zip(boxes, scores, labels, strict=True):
        overlaps = box_iou(box[None], means[:num_means])[0] * (mean_labels[:num_means] == label)
        at = int(overlaps.argmax()) if num_means and overlaps.max() > min_overlap else num_means
        if at == num_means:
            mean_labels[at], num_means = label, num_means + 1
        sums[at] += score * box
        totals[at] += score
        counts[at] += 1
        means[at] = sums[at] / totals[at]
    counts, totals = counts[:num_means], totals[:num_means]
    fused = totals / counts * counts.clamp_max(len(views)) / len(views)
    fused, order = fused.sort(descending=True, stable=True)
    merged = Boxes(boxes=means[:num_means][order], scores=fused, labels=mean_labels[:num_means][order])
    return move_boxes([merged], device)[0]


def move_boxes(found: Sequence[Boxes], device: torch.device) -> list[Boxes]:
    """Return the boxes of a batch on a device, copied together.

    Args:
        found: The boxes of each image, all with scores or all without.
        device: Where they should be.

    Returns:
        The same boxes.
    """
    counts = [len(each["boxes"]) for each in found]
    joined = [torch.cat([cast(dict[str, Tensor], each)[name] for each in found]) for name in found[0]]
    moved = read(*joined) if device.type == "cpu" else [each.to(device, non_blocking=True) for each in joined]
    parts = zip(*(each.split(counts) for each in moved), strict=True)
    return [cast(Boxes, dict(zip(found[0], values, strict=True))) for values in parts]


def select_boxes(found: Boxes, chosen: Tensor) -> Boxes:
    """Return some of the boxes of an image.

    Args:
        found: The boxes.
        chosen: A mask or indices.

    Returns:
        The boxes with everything that belongs to them.
    """
    selected: Boxes = {"boxes": found["boxes"][chosen], "labels": found["labels"][chosen]}
    if "scores" in found:
        selected["scores"] = found["scores"][chosen]
    return selected


def pack(found: Sequence[Boxes], max_boxes: int) -> Tensor:
    """Return the boxes of a batch as one tensor.

    Args:
        found: The boxes of each image by descending score.
        max_boxes: How many boxes each image has room for.

    Returns:
        (N, ``max_boxes``, 6): left, top, right, bottom, score and class, which is -1 where there is no box.
    """
    first = at_least_float32(found[0]["boxes"])  # bfloat16 tells neither pixels nor classes apart
    packed = first.new_zeros(len(found), max_boxes, 6)
    packed[..., 5] = -1
    for row, each in zip(packed, found, strict=True):
        count = min(len(each["boxes"]), max_boxes)
        row[:count, :4] = each["boxes"][:count]
        row[:count, 4], row[:count, 5] = each["scores"][:count], each["labels"][:count]
    return packed


def unpack(packed: Tensor) -> list[Boxes]:
    """Return the boxes of each image, what :func:`pack` was given.

    Args:
        packed: (N, n, 6), from :func:`pack`.

    Returns:
        The boxes.
    """
    (counts,) = read((packed[..., 5] >= 0).sum(1))
    rows = (row[:count] for row, count in zip(packed, counts.tolist(), strict=True))
    return [{"boxes": row[:, :4], "scores": row[:, 4], "labels": row[:, 5].long()} for row in rows]


@dataclass(frozen=True)
class Letterbox:
    """How images were fitted to a network: scaled, and placed on a gray canvas.

    Attributes:
        scale_x: Width of the scaled image relative to the image.
        scale_y: Height likewise.
        left: Columns of the border at the left.
        top: Rows of the border at the top.
        height: Rows of the image.
        width: Columns of the image.
    """

    scale_x: float
    scale_y: float
    left: int
    top: int
    height: int
    width: int

    def to_canvas(self, boxes: Tensor) -> Tensor:
        """Map boxes to the canvas.

        Args:
            boxes: Left, top, right and bottom in pixels of the image (n, 4).

        Returns:
            The same in pixels of the canvas.
        """
        return boxes * self._scales(boxes) + self._offsets(boxes)

    def to_image(self, boxes: Tensor) -> Tensor:
        """Map boxes back to the image.

        Args:
            boxes: Left, top, right and bottom in pixels of the canvas (n, 4).

        Returns:
            The same in pixels of the image, and within it.
        """
        boxes = (boxes - self._offsets(boxes)) / self._scales(boxes)
        return boxes.clamp_min(0).minimum(boxes.new_tensor([self.width, self.height] * 2))

    def _scales(self, boxes: Tensor) -> Tensor:
        return boxes.new_tensor([self.scale_x, self.scale_y] * 2)

    def _offsets(self, boxes: Tensor) -> Tensor:
        return boxes.new_tensor([self.left, self.top] * 2)


def letterbox(images: Tensor, size: int | None, stride: int) -> tuple[Tensor, Letterbox]:
    """Fit images to a network whose sides are multiples of a stride, keeping their shape.

    Args:
        images: (N, 3, H, W) in [0, 1].
        size: The longer side on the canvas; None to keep the resolution.
        stride: What both sides of the canvas are multiples of.

    Returns:
        The canvases, and the way back.

    >>> canvas, fit = letterbox(torch.rand(1, 3, 60, 120), 64, 32)
    >>> tuple(canvas.shape), fit.to_image(torch.tensor([[0.0, 0.0, 64.0, 32.0]])).round().tolist()
    ((1, 3, 32, 64), [[0.0, 0.0, 120.0, 60.0]])
    """
    height, width = images.shape[-2:]
    ratio = 1.0 if size is None else size / max(height, width)
    rows, columns = max(1, round(height * ratio)), max(1, round(width * ratio))
    if (rows, columns) != (height, width):
        images = F.interpolate(images, (rows, columns), mode="bilinear", align_corners=False, antialias=ratio < 1)
    down, across = -rows % stride, -columns % stride
    if down or across:
        borders = (across // 2, across - across // 2, down // 2, down - down // 2)
        images = F.pad(images, borders, value=BORDER)
    return images, Letterbox(columns / width, rows / height, across // 2, down // 2, height, width)
