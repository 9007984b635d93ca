"""Boxes: overlap, suppression of duplicates, fusion of several predictions, and fitting images to a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

#: Boxes beyond these are not compared with each other: those with the highest scores are kept.
MAX_CANDIDATES = 1000
#: The gray of the border around a letterboxed image.
BORDER = 114 / 255


class Boxes(TypedDict):
    """The boxes of one image: what a detector finds, or what it should find.

    Attributes:
        boxes: Left, top, right and bottom in pixels of the image (n, 4).
        labels: Class indices (n), int64.
        scores: How sure the detector is, from 0 to 1 (n), in descending order; targets may have none.
    """

    boxes: Tensor
    labels: Tensor
    scores: NotRequired[Tensor]


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


def suppress(found: Boxes, max_overlap: float, max_boxes: int) -> Boxes:
    """Return the best boxes, without those that overlap a better one of their class (non-maximum suppression).

    Args:
        found: Boxes in any order.
        max_overlap: The largest intersection over union that two boxes of a class may have.
        max_boxes: How many boxes to return at most.

    Returns:
        The boxes by descending score.
    """
    scores, order = found["scores"].sort(descending=True, stable=True)
    scores, order = scores[:MAX_CANDIDATES], order[:MAX_CANDIDATES]
    boxes, labels = found["boxes"][order], found["labels"][order]
    hides = ((box_iou(boxes, boxes) > max_overlap) & (labels[:, None] == labels)).triu(1)
    kept = torch.ones_like(labels, dtype=torch.bool)
    while True:  # each pass settles at least the next box, and in practice three or four settle all
        visible = ~(hides & kept[:, None]).any(0)
        if torch.equal(visible, kept):
            break
        kept = visible
    chosen = kept.nonzero()[:max_boxes, 0]
    return {"boxes": boxes[chosen], "scores": scores[chosen], "labels": labels[chosen]}


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
    return {"boxes": means[:num_means][order], "scores": fused, "labels": mean_labels[:num_means][order]}


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
    first = found[0]["boxes"]
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
    rows = (row[row[:, 5] >= 0] for row in packed)
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
