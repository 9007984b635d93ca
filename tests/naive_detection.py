"""Detection written down a second time, one box, one anchor and one layer after the other."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

from ctta.detection import Boxes, YOLOv5, YOLOv5Detector

Box = tuple[list[float], float, int]


def overlap(a: Sequence[float], b: Sequence[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    inner = width * height
    return inner / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inner)


def to_list(found: Boxes) -> list[Box]:
    return list(zip(found["boxes"].tolist(), found["scores"].tolist(), found["labels"].tolist(), strict=True))


def suppress_one_by_one(found: Boxes, max_overlap: float) -> list[Box]:
    kept: list[Box] = []
    for each in sorted(to_list(found), key=lambda box: -box[1]):
        if all(other[2] != each[2] or overlap(other[0], each[0]) <= max_overlap for other in kept):
            kept.append(each)
    return kept


def fuse_one_by_one(views: Sequence[Boxes], min_overlap: float) -> list[Box]:
    clusters: list[list[Box]] = []

    def mean_of(cluster: list[Box]) -> list[float]:
        total = sum(score for _, score, _ in cluster)
        return [sum(score * box[side] for box, score, _ in cluster) / total for side in range(4)]

    for each in sorted((box for view in views for box in to_list(view)), key=lambda box: -box[1]):
        fits = [(overlap(mean_of(other), each[0]), other) for other in clusters if other[0][2] == each[2]]
        best = max(fits, key=lambda pair: pair[0], default=(0.0, []))
        if best[0] > min_overlap:
            best[1].append(each)
        else:
            clusters.append([each])
    fused = []
    for cluster in clusters:
        mean_score = sum(score for _, score, _ in cluster) / len(cluster)
        fused.append((mean_of(cluster), mean_score * min(len(cluster), len(views)) / len(views), cluster[0][2]))
    return sorted(fused, key=lambda box: -box[1])


def binary_cross_entropy(logit: Tensor, target: Any) -> Tensor:
    p = logit.sigmoid()
    loss: Tensor = -(target * p.log() + (1 - target) * (1 - p).log())
    return loss


def complete_overlap(x: Tensor, y: Tensor, w: Tensor, h: Tensor, box: Sequence[float]) -> Tensor:
    u, v, s, t = (torch.tensor(each, dtype=x.dtype) for each in box)
    inner_width = (torch.min(x + w / 2, u + s / 2) - torch.max(x - w / 2, u - s / 2)).clamp(min=0)
    inner_height = (torch.min(y + h / 2, v + t / 2) - torch.max(y - h / 2, v - t / 2)).clamp(min=0)
    inner = inner_width * inner_height
    iou = inner / (w * h + s * t - inner + 1e-7)
    hull_width = torch.max(x + w / 2, u + s / 2) - torch.min(x - w / 2, u - s / 2)
    hull_height = torch.max(y + h / 2, v + t / 2) - torch.min(y - h / 2, v - t / 2)
    far = ((x - u) ** 2 + (y - v) ** 2) / (hull_width**2 + hull_height**2 + 1e-7)
    shape = 4 / math.pi**2 * (torch.atan(s / (t + 1e-7)) - torch.atan(w / (h + 1e-7))) ** 2
    alpha = (shape / (1 - iou + shape + 1e-7)).detach()
    complete: Tensor = iou - far - alpha * shape
    return complete


def yolov5_loss_by_loops(net: YOLOv5, images: Tensor, targets: Sequence[Boxes]) -> Tensor:
    """The loss for images whose sides are multiples of 32."""
    raw, total = net(images), torch.zeros((), dtype=images.dtype)
    for level, (maps, stride, weight) in enumerate(zip(raw, (8, 16, 32), (4.0, 1.0, 0.4), strict=True)):
        height, width = maps.shape[2:4]
        wanted: dict[tuple[int, int, int, int], float] = {}
        box_losses, class_losses = [], []
        for image, each in enumerate(targets):
            for (x1, y1, x2, y2), label in zip(each["boxes"].tolist(), each["labels"].tolist(), strict=True):
                cx, cy, w, h = (x1 + x2) / 2 / stride, (y1 + y2) / 2 / stride, (x2 - x1) / stride, (y2 - y1) / stride
                cells = [(int(cx), int(cy))]
                if cx % 1 < 0.5 and cx > 1:
                    cells.append((int(cx) - 1, int(cy)))
                if cy % 1 < 0.5 and cy > 1:
                    cells.append((int(cx), int(cy) - 1))
                if (width - cx) % 1 < 0.5 and width - cx > 1:
                    cells.append((int(cx) + 1, int(cy)))
                if (height - cy) % 1 < 0.5 and height - cy > 1:
                    cells.append((int(cx), int(cy) + 1))
                for anchor, (aw, ah) in enumerate(net.anchors[level].tolist()):
                    if max(w / aw, aw / w, h / ah, ah / h) >= 4:
                        continue
                    for column, row in cells:
                        out = maps[image, anchor, row, column]
                        px, py = 2 * out[0].sigmoid() - 0.5, 2 * out[1].sigmoid() - 0.5
                        pw, ph = (2 * out[2].sigmoid()) ** 2 * aw, (2 * out[3].sigmoid()) ** 2 * ah
                        iou = complete_overlap(px, py, pw, ph, (cx - column, cy - row, w, h))
                        box_losses.append(1 - iou)
                        key = (image, anchor, row, column)
                        wanted[key] = max(wanted.get(key, 0.0), float(iou.detach().clamp(min=0)))
                        class_losses += [
                            binary_cross_entropy(out[5 + k], float(k == label)) for k in range(net.num_classes)
                        ]
        objectness = [
            binary_cross_entropy(maps[image, anchor, row, column, 4], wanted.get((image, anchor, row, column), 0.0))
            for image in range(len(images))
            for anchor in range(maps.shape[1])
            for row in range(height)
            for column in range(width)
        ]
        total = total + net.gains[1] * weight * sum(objectness) / len(objectness)
        if box_losses:
            total = total + net.gains[0] * sum(box_losses) / len(box_losses)
            total = total + net.gains[2] * sum(class_losses) / len(class_losses)
    return total


class NaiveActMAD:
    """One batch after the other, layer by layer, with hooks of its own."""

    def __init__(self, net: YOLOv5, source: Sequence[Tensor], *, skip: int, per_location: bool, lr: float) -> None:
        self.net = copy.deepcopy(net).eval()
        self.axes = [0] if per_location else [0, 2, 3]
        norms = [module for module in self.net.modules() if isinstance(module, nn.BatchNorm2d)][skip:]
        self.seen: list[Tensor] = []
        for norm in norms:
            norm.register_forward_hook(lambda module, inputs, output: self.seen.append(output))
        self.source = []
        sums: list[list[Tensor]] = [[] for _ in range(2 * len(norms))]
        with torch.no_grad():
            for x in source:
                for number, value in enumerate(self._moments(x)):
                    sums[number].append(value)
        self.source = [sum(each[1:], each[0]) / len(each) for each in sums]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def _moments(self, x: Tensor) -> list[Tensor]:
        self.seen.clear()
        self.net.features(x)
        return [moment for each in self.seen for moment in (each.mean(self.axes), each.var(self.axes))]

    def __call__(self, x: Tensor) -> list[Boxes]:
        answer = YOLOv5Detector(self.net).predict(x)
        pairs = zip(self._moments(x), self.source, strict=True)
        loss = torch.stack([(ours - theirs).abs().mean() for ours, theirs in pairs]).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return answer


class NaiveBoxCoTTA:
    """Without restoring and without other colors, which the twin does not draw."""

    def __init__(self, net: YOLOv5, *, decay: float, scale: float, min_threshold: float, lr: float) -> None:
        self.student, self.teacher = copy.deepcopy(net).eval(), copy.deepcopy(net).eval()
        self.decay, self.scale, self.min_threshold = decay, scale, min_threshold
        self.thresholds = [0.8] * net.num_classes
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)

    def __call__(self, x: Tensor) -> list[list[Box]]:
        detector = YOLOv5Detector(self.teacher)
        size = [round(side * self.scale) for side in x.shape[2:]]
        larger = nn.functional.interpolate(x, size, mode="bilinear", align_corners=False)
        height, width = x.shape[2:]
        views = []
        for images, flipped in ((x, False), (x.flip(3), True), (larger, False), (larger.flip(3), True)):
            found = detector.predict(images)
            for each in found:
                boxes = each["boxes"].clone()
                if flipped:
                    boxes[:, 0], boxes[:, 2] = (
                        images.shape[3] - each["boxes"][:, 2],
                        images.shape[3] - each["boxes"][:, 0],
                    )
                boxes[:, 0::2] *= width / images.shape[3]
                boxes[:, 1::2] *= height / images.shape[2]
                each["boxes"] = boxes
            views.append(found)
        answer = [fuse_one_by_one(each, 0.55)[:100] for each in zip(*views, strict=True)]
        for label, old in enumerate(self.thresholds):
            scores = [score for image in answer for _, score, k in image if k == label and score > 0.1]
            if scores:
                new = 0.95 * old + 0.05 * 1.3 * math.sqrt(sum(scores) / len(scores))
                self.thresholds[label] = min(max(new, self.min_threshold), 0.9)
        targets = []
        for image in answer:
            chosen = [(box, k) for box, score, k in image if score > self.thresholds[k]]
            boxes = torch.tensor([box for box, _ in chosen], dtype=x.dtype).view(-1, 4)
            targets.append(Boxes(boxes=boxes, labels=torch.tensor([k for _, k in chosen], dtype=torch.long)))
        self.num_targets = sum(len(each["labels"]) for each in targets)
        if self.num_targets:
            loss = yolov5_loss_by_loops(self.student, x, targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for old_weight, new_weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old_weight.data = self.decay * old_weight.data + (1 - self.decay) * new_weight.data
        return answer


class NaiveWHW:
    """With distances from torch.distributions, and adaptors that are called by hand."""

    def __init__(
        self, net: YOLOv5, adaptors: nn.ModuleList, stats: dict[str, Tensor], *, lr: float, always: bool
    ) -> None:
        self.net, self.adaptors = copy.deepcopy(net).eval().requires_grad_(False), copy.deepcopy(adaptors)
        self.stats, self.always = stats, always
        self.levels = [stats[f"level.mean/{number}"].clone() for number in range(3)]
        self.labels = [int(key.split("/")[1]) for key in stats if key.startswith("object.mean/")]
        self.objects = {label: stats[f"object.mean/{label}"].clone() for label in self.labels}
        self.counts = dict.fromkeys(self.labels, 0)
        self.mean_loss, self.step, self.paused, self.num_updates = 0.0, 0, 0, 0
        blocks = [module for module in self.net.modules() if type(module).__name__ == "CrossStage"]
        for block, adaptor in zip(blocks, self.adaptors, strict=True):
            self._wrap(block, adaptor)
        self.optimizer = torch.optim.SGD(self.adaptors.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)

    @staticmethod
    def _wrap(block: Any, adaptor: Any) -> None:
        def forward(x: Tensor) -> Tensor:
            joined = torch.cat([block.m(block.cv1(x)), block.cv2(x)], 1)
            hidden = torch.relu(nn.functional.conv2d(joined, adaptor.down.weight, adaptor.down.bias))
            added = nn.functional.conv2d(hidden, adaptor.up.weight, adaptor.up.bias)
            return nn.functional.silu(block.cv3.bn(block.cv3.conv(joined)) + added)

        block.forward = forward

    def _distance(self, mean: Tensor, key: str) -> Tensor:
        covariance = self.stats[key.replace("mean", "covariance")]
        covariance = covariance + covariance.max() / 30 * torch.eye(len(covariance), dtype=covariance.dtype)
        ours, theirs = MultivariateNormal(mean, covariance), MultivariateNormal(self.stats[key], covariance)
        return 0.5 * (kl_divergence(ours, theirs) + kl_divergence(theirs, ours))

    def __call__(self, x: Tensor) -> list[Boxes]:
        answer = YOLOv5Detector(self.net).predict(x)
        maps = self.net.features(x)
        means = []
        for old, each in zip(self.levels, maps, strict=True):
            mean = old
            for vector in each.mean((2, 3)):
                mean = mean + (vector - old) / 128
            means.append(mean)
        distances = [self._distance(mean, f"level.mean/{number}") for number, mean in enumerate(means)]
        loss = distances[0] + distances[1] + distances[2]
        self.levels = [mean.detach() for mean in means]
        step, self.step = self.step, self.step + 1
        if self.paused % 10:
            self.paused += 1
            return answer
        noise = sum(float(self.stats[f"level.divergence/{number}"]) for number in range(3))
        value = loss.item()
        moved = value > 2 * 1.1 * noise or value / (self.mean_loss + 1e-7) > 1.05
        self.mean_loss = 0.99 * self.mean_loss + 0.01 * value
        if not (self.always or moved or step % 10 == 0):
            self.paused = 1
            return answer
        self.paused = 0
        vectors: dict[int, list[Tensor]] = {label: [] for label in self.labels}
        for image, found_here in zip(maps[0], answer, strict=True):
            for box, score, label in zip(
                found_here["boxes"], found_here["scores"], found_here["labels"].tolist(), strict=True
            ):
                if score >= 0.5 and label in vectors:
                    points = [
                        self._read(image, x.shape, box[0] + (box[2] - box[0]) * i, box[1] + (box[3] - box[1]) * j)
                        for i in (1 / 6, 1 / 2, 5 / 6)
                        for j in (1 / 6, 1 / 2, 5 / 6)
                    ]
                    vectors[label].append(sum(points[1:], points[0]) / 9)
        for label in self.labels:
            self.counts[label] += len(vectors[label])
        for label, found in vectors.items():
            if found:
                step_size = min(1.0, len(found) / 128)
                mean = self.objects[label] + step_size * (sum(found[1:], found[0]) / len(found) - self.objects[label])
                weight = min(math.log(max(self.counts.values()) / self.counts[label]) + 0.01, 10) ** 2
                loss = loss + weight * self._distance(mean, f"object.mean/{label}")
                self.objects[label] = mean.detach()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.adaptors.parameters(), 5.0)
        self.optimizer.step()
        self.num_updates += 1
        return answer

    @staticmethod
    def _read(image: Tensor, shape: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
        """Read a map at a point of the image, between its cells."""
        height, width = image.shape[1:]
        column = float(x) / shape[3] * width - 0.5
        row = float(y) / shape[2] * height - 0.5
        column, row = min(max(column, 0.0), width - 1.0), min(max(row, 0.0), height - 1.0)
        left, top = min(int(column), max(width - 2, 0)), min(int(row), max(height - 2, 0))
        a, b = column - left, row - top
        right, bottom = min(left + 1, width - 1), min(top + 1, height - 1)
        upper = (1 - a) * image[:, top, left] + a * image[:, top, right]
        lower = (1 - a) * image[:, bottom, left] + a * image[:, bottom, right]
        return (1 - b) * upper + b * lower
