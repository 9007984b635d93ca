"""An independent implementation of VANE with plain loops. See naive.py."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from naive import NaiveAdam, add_up, probabilities
from naive_entropy import likelihood_ratio, mean_probabilities
from torch import Tensor, nn

from ctta.views import ScaledView, View
from ctta.views.geometric import MovedView

Matrix = list[list[float]]
FIRST_COUNT = 100  # how many uniform predictions the class frequencies of a domain start from


def normalized(values: Sequence[float]) -> list[float]:
    return [value / sum(values) for value in values]


class NaiveChain:
    """Labels that stay with probability s and are drawn from pi otherwise, by the whole transition matrix."""

    def __init__(self, class_memory: float, doubt: float = 0.0) -> None:
        self.class_memory, self.doubt = class_memory, doubt
        self.counts: list[float] = []
        self.message: list[float] | None = None
        self.stays, self.transitions = 0.0, 0.0

    @property
    def stickiness(self) -> float:
        return (self.stays + 1) / (self.transitions + 6)

    @property
    def frequencies(self) -> list[float]:
        return [0.9 * count / sum(self.counts) + 0.1 / len(self.counts) for count in self.counts]

    def follow(self, logits: Tensor, is_new_domain: bool = False) -> Matrix:
        """Return the posteriors of the batch."""
        p = [[float(q) for q in probabilities(vector / 2)] for vector in logits.detach()]
        classes = range(logits.shape[1])
        if is_new_domain or not self.counts:
            self.counts = [FIRST_COUNT / len(classes) for _ in classes]
        self.counts = [math.exp(-len(p) / self.class_memory) * self.counts[j] + sum(q[j] for q in p) for j in classes]
        old_stays, old_transitions, s = self.stays, self.transitions, self.stickiness
        forward, posteriors = list[list[float]](), list[list[float]]()
        for _ in range(2):
            forward, posteriors, stays = self.forward_backward(p, s)
            self.stays = math.exp(-len(p) / 100) * old_stays + stays
            self.transitions = math.exp(-len(p) / 100) * old_transitions + len(p)
            s = self.stickiness
        self.message = forward[-1]
        return posteriors

    def forward_backward(self, p: Matrix, s: float) -> tuple[Matrix, Matrix, float]:
        pi, classes = self.frequencies, range(len(self.counts))
        matrix = [[s * (i == j) + (1 - s) * pi[j] for j in classes] for i in classes]
        evidence = [[(1 - self.doubt) * q[j] / pi[j] + self.doubt for j in classes] for q in p]
        forward, before = list[list[float]](), self.message
        for e in evidence:
            prior = pi if before is None else [sum(before[i] * matrix[i][j] for i in classes) for j in classes]
            before = normalized([prior[j] * e[j] for j in classes])
            forward.append(before)
        backward = [[1.0 for _ in classes]]
        for e in reversed(evidence[1:]):
            later = backward[0]
            backward.insert(0, normalized([sum(matrix[i][j] * e[j] * later[j] for j in classes) for i in classes]))
        posteriors = [normalized([f[j] * b[j] for j in classes]) for f, b in zip(forward, backward, strict=True)]
        stays = 0.0
        for t, e in enumerate(evidence):
            previous = forward[t - 1] if t else self.message
            if previous is not None:
                pairs = [[previous[i] * matrix[i][j] * e[j] * backward[t][j] for j in classes] for i in classes]
                # A label that equals the one before has stayed, or was drawn again.
                repeated = sum(pairs[j][j] * s / matrix[j][j] for j in classes)
                stays += repeated / sum(sum(row) for row in pairs)
        return forward, posteriors, stays


def naive_look(image: Tensor) -> list[float]:
    """Return the brightness, contrast and sharpness of the channels of an image, pixel by pixel."""
    channels = image if image.ndim == 3 else image.reshape(1, 1, -1)
    means, contrasts, steps = list[float](), list[float](), list[float]()
    for channel in channels:
        rows = [[float(value) for value in row] for row in channel]
        values = [value for row in rows for value in row]
        means.append(sum(values) / len(values))
        contrasts.append(math.log(sum((value - means[-1]) ** 2 for value in values) / len(values) + 1e-4))
        sideways = [(right - left) ** 2 for row in rows for left, right in pairwise(row)]
        down = [(low - high) ** 2 for upper, lower in pairwise(rows) for high, low in zip(upper, lower, strict=True)]
        steps.append(math.log(sum(sum(found) / len(found) for found in (sideways, down) if found) + 1e-4))
    return means + contrasts + steps


class NaiveDomain:
    """What the images of a domain look like, by decaying weights of all of them."""

    def __init__(self, max_distance: float | None) -> None:
        self.max_distance = max_distance
        self.looks, self.weights, self.recent_weights = list[list[float]](), list[float](), list[float]()

    def begins_with(self, x: Tensor) -> bool:
        """Return whether a batch begins another domain."""
        looks = [naive_look(image) for image in x]
        num, features = len(looks), range(len(looks[0]))
        recent_weights = [math.exp(-num / 16) * weight for weight in self.recent_weights] + [1.0] * num
        if sum(self.weights) >= 16 and self.max_distance is not None:
            distance = 0.0
            for j in features:
                mean = sum(w * look[j] for w, look in zip(self.weights, self.looks, strict=True)) / sum(self.weights)
                terms = [w * (look[j] - mean) ** 2 for w, look in zip(self.weights, self.looks, strict=True)]
                pairs = zip(recent_weights, self.looks + looks, strict=True)
                recent = sum(w * look[j] for w, look in pairs) / sum(recent_weights)
                least = 0.1
                if j < len(features) // 3:
                    column = len(features) // 3 + j  # the logarithm of the variance of its pixels
                    pairs = zip(self.weights, self.looks, strict=True)
                    least *= math.exp(sum(w * look[column] for w, look in pairs) / sum(self.weights))
                distance += (recent - mean) ** 2 / max(sum(terms) / sum(self.weights), least) / len(features)
            if distance > self.max_distance:
                self.looks, self.weights, self.recent_weights = looks, [1.0] * num, [1.0] * num
                return True
        self.looks = self.looks + looks
        self.weights = [math.exp(-num / 1000) * weight for weight in self.weights] + [1.0] * num
        self.recent_weights = recent_weights
        return False

    @property
    def mean(self) -> list[float]:
        """The mean look of the domain."""
        columns = zip(*self.looks, strict=True)
        return [sum(map(math.prod, zip(self.weights, column, strict=True))) / sum(self.weights) for column in columns]


class NaiveMirror:
    """Whether mirrored images keep their class, by decaying weights of sure predictions."""

    def __init__(self) -> None:
        self.agreed, self.total = 20.0, 20.0

    @property
    def keeps_classes(self) -> bool:
        return self.agreed / self.total >= 0.75

    def compare(self, direct: Tensor, mirrored: Tensor) -> None:
        pairs = zip(direct.detach(), mirrored, strict=True)
        sure = [(one, two) for one, two in pairs if max(float(q) for q in probabilities(one)) > 0.9]
        kept = math.exp(-len(sure) / 200)
        self.total = kept * self.total + len(sure)
        self.agreed = kept * self.agreed + sum(int(one.argmax()) == int(two.argmax()) for one, two in sure)


class NaiveShiftNorm(nn.Module):
    """A BatchNorm whose statistics move from the source's to those of the stream as these move away."""

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.source_mean, self.source_variance = layer.running_mean.tolist(), layer.running_var.tolist()
        self.mean, self.variance, self.scatter = list(self.source_mean), list(self.source_variance), 0.0
        self.share, self.size, self.is_view, self.fraction, self.distance = 1.0, 1.0, False, 0.0, 0.0
        self.after = self.mean, self.variance, self.scatter

    def forward(self, x: Tensor) -> Tensor:
        channels, a, means, variances, d, scatter = range(x.shape[1]), self.share, [], [], 0.0, 0.0
        for c in channels:
            values, unit = x[:, c].reshape(len(x), -1), self.source_variance[c] + self.eps
            mean = (1 - a) * self.mean[c] + a * add_up(values.flatten()) / values.numel()
            moments = [((image - mean) ** 2).mean() for image in values]  # about the mean over recent images
            variance = (1 - a) * (self.variance[c] + (self.mean[c] - mean) ** 2) + a * add_up(moments) / len(moments)
            means.append(mean)
            variances.append(variance)
            shift = (float(mean.detach()) - self.source_mean[c]) ** 2 / unit
            stretch = math.log((float(variance.detach()) + self.eps) / unit) ** 2
            d += (shift + stretch) / len(channels)
            for image, moment in zip(values, moments, strict=True):
                of_mean = float((image.mean() - mean).detach()) ** 2 / unit
                of_variance = float(((moment - variance) / (variance + self.eps)).detach()) ** 2
                scatter += (of_mean + of_variance) / len(x) / len(channels)
        if not self.is_view:
            scatter = (1 - a) * self.scatter + a * scatter
            self.distance = max(0.0, d - (scatter + 4 / self.size) / self.size)
            self.after = [float(b.detach()) for b in means], [float(v.detach()) for v in variances], scatter
        outputs, m = [], self.fraction
        for c in channels:
            mean = (1 - m) * self.source_mean[c] + m * means[c]
            variance = (1 - m) * self.source_variance[c] + m * variances[c]
            outputs.append((x[:, c] - mean) / (variance + self.eps) ** 0.5 * self.weight[c] + self.bias[c])
        return torch.stack(outputs, 1)


def naive_motion(view: MovedView, x: Tensor) -> Tensor:
    """Return the batch as a view shows it, computed pixel by pixel; beyond its edges an image goes on as it ends."""
    height, width = x.shape[2:]
    angle, moved = math.radians(view.degrees), torch.zeros_like(x)
    for r in range(height):
        for c in range(width):
            right = c - (width - 1) / 2 - round(2 * view.translate_x * width)
            down = r - (height - 1) / 2 - round(2 * view.translate_y * height)
            from_c = (math.cos(angle) * right + math.sin(angle) * down) / view.scale + (width - 1) / 2
            from_r = (math.cos(angle) * down - math.sin(angle) * right) / view.scale + (height - 1) / 2
            from_c, from_r = min(max(from_c, 0), width - 1), min(max(from_r, 0), height - 1)
            left, top = math.floor(from_c), math.floor(from_r)
            for row, row_weight in ((top, 1 - (from_r - top)), (min(top + 1, height - 1), from_r - top)):
                for column, weight in ((left, 1 - (from_c - left)), (min(left + 1, width - 1), from_c - left)):
                    moved[:, :, r, width - 1 - c if view.flip else c] += row_weight * weight * x[:, :, row, column]
    return moved


@dataclass
class NaiveRun:
    """Predictions, the student, and for each batch the stickiness of both chains and whether it was learned from."""

    student: nn.Sequential
    predictions: list[Tensor] = field(default_factory=list)
    stickiness: list[float] = field(default_factory=list)
    source_stickiness: list[float] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)
    new_domain: list[bool] = field(default_factory=list)
    mirrors: list[bool] = field(default_factory=list)
    domain: NaiveDomain = field(default_factory=lambda: NaiveDomain(None))
    sample_size: float = 0.0
    fraction: float = 0.0


def shifted_copy(net: nn.Sequential, tolerance: float | None) -> nn.Sequential:
    net = copy.deepcopy(net).eval()
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and tolerance is not None:
            net[number] = NaiveShiftNorm(layer)
    return net


def naive_fraction(layers: list[NaiveShiftNorm], tolerance: float) -> float:
    """Return how far the layers move."""
    middle = sorted(layer.distance for layer in layers)[(len(layers) - 1) // 2]
    is_shifted = middle**2 / (middle**2 + tolerance**2) if middle else 0.0
    return min(1.0, 1.6 / math.sqrt(len(layers))) * is_shifted


def naive_vane(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    draw: Callable[[int], Sequence[View]],
    tolerance: float | None = 0.025,
    horizon: float = 64.0,
    max_distance: float | None = 0.5,
    flips: bool | str = "auto",
    min_stickiness: float = 0.45,
    learn: bool = True,
    lr: float = 1e-3,
    eps: float = 1e-8,
    keep: float = 0.99,
    weight: float = 0.025,
) -> NaiveRun:
    """Run VANE with Adam; ``draw`` returns the views of a step."""
    student, source = shifted_copy(net, tolerance), copy.deepcopy(net).eval()
    shifting = [layer for layer in student if isinstance(layer, NaiveShiftNorm)]
    kinds: Any = NaiveShiftNorm | nn.BatchNorm2d | nn.GroupNorm
    trained = [p for layer in student if isinstance(layer, kinds) for p in (layer.weight, layer.bias)]
    original = [p.detach().clone() for p in trained]
    descent, run = NaiveAdam(trained, eps=eps), NaiveRun(student)
    domain, mirror, memory = NaiveDomain(max_distance), NaiveMirror(), 200 if max_distance is None else 1000
    source_chain, chain = NaiveChain(memory, 0.3), NaiveChain(memory)
    run.domain = domain
    for step, x in enumerate(batches):
        worth, of_source, is_new_domain = float(len(x)), None, domain.begins_with(x)
        if shifting:
            logits = source(x)
            if logits.ndim == 2:
                of_source = source_chain.follow(logits, is_new_domain)
                if source_chain.stickiness > min_stickiness:
                    repeats = (source_chain.stickiness - min_stickiness) / (1 - min_stickiness)
                    worth *= (1 - repeats) / (1 + repeats)
        is_first = is_new_domain or step == 0
        kept = 0.0 if is_first else math.exp(-math.sqrt(len(x) * worth) / horizon) * run.sample_size
        run.sample_size = kept + worth
        for layer in shifting:
            layer.share, layer.size, layer.is_view = worth / run.sample_size, run.sample_size, False
        if shifting and is_first:
            student(x)
            run.fraction = naive_fraction(shifting, tolerance or 0.0)
        for layer in shifting:
            layer.fraction = run.fraction * run.sample_size / (run.sample_size + 8)
        direct = student(x)
        for layer in shifting:
            layer.is_view = True
        views, mirrored = list(draw(step)), None
        if views and isinstance(views[0], ScaledView) and flips is not True:  # the first only flips
            with torch.no_grad():
                mirrored = views.pop(0)(student, x)
            if flips is False or not mirror.keeps_classes:
                views = [dataclasses.replace(view, flip=False) for view in views if isinstance(view, MovedView)]
        with torch.no_grad():
            terms = [view(student, x) for view in views]
        for layer in shifting:
            layer.mean, layer.variance, layer.scatter = layer.after
        if shifting:
            run.fraction = naive_fraction(shifting, tolerance or 0.0)
        if mirrored is not None and flips == "auto":
            mirror.compare(direct, mirrored)
            if mirror.keeps_classes:
                terms.append(mirrored)
        answer = add_up([direct.detach(), *terms]) / (1 + len(terms))
        learns = False
        if direct.ndim == 2:
            posteriors = chain.follow(answer, is_new_domain)
            longer = (1 - chain.stickiness) / (1 - source_chain.stickiness)
            hidden = longer > 2.5 and min_stickiness < source_chain.stickiness
            repeat = chain.stickiness > min_stickiness or hidden
            if repeat:
                rows = of_source if hidden and of_source is not None else posteriors
                answer = torch.tensor([[math.log(q) for q in row] for row in rows], dtype=answer.dtype)
            most = max((source_chain if shifting else chain).frequencies)
            learns = learn and bool(trained) and not repeat and most <= (1 + 2 / direct.shape[1]) / 3
            run.hidden.append(hidden)
        if learns:
            vectors = list(direct)
            p = mean_probabilities(vectors)
            frequencies = [0.9 * pi + 0.1 * q for pi, q in zip(chain.frequencies, p, strict=True)]
            diversity = add_up(f * f.log() for f in frequencies)
            ratio = add_up(likelihood_ratio(vector) for vector in vectors) / len(vectors)
            scale = min(1.0, len(x) / 16) ** 2
            descent.lr = lr * scale
            descent.step(torch.autograd.grad(diversity + weight * ratio, trained))
            with torch.no_grad():
                for parameter, first in zip(trained, original, strict=True):
                    parameter.copy_(keep**scale * parameter + (1 - keep**scale) * first)
        run.predictions.append(answer)
        run.stickiness.append(chain.stickiness)
        run.source_stickiness.append(source_chain.stickiness)
        run.learned.append(learns)
        run.new_domain.append(is_new_domain)
        run.mirrors.append(mirror.keeps_classes if flips == "auto" else bool(flips))
    return run
