"""An independent implementation of the methods with plain loops, straight from the paper, to compare the library with.

Only the positions of restored weights and the drawn views come from the library, since both sides need the same random
draws; their distribution is tested elsewhere.
"""

import colorsys
import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ctta.functional import bernoulli_positions
from ctta.views import ImageView, View


class NaiveOptimizer(Protocol):
    def step(self, gradients: Sequence[Tensor]) -> None: ...


MakeOptimizer = Callable[[list[nn.Parameter]], NaiveOptimizer]


class NaiveBatchNorm(nn.Module):
    """Normalizes channel by channel by (1-fraction) * running + fraction * batch statistics."""

    def __init__(self, layer: nn.BatchNorm2d, fraction: float) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.weight, self.bias, self.eps, self.fraction = layer.weight, layer.bias, layer.eps, fraction
        self.running_mean, self.running_var = layer.running_mean, layer.running_var

    def forward(self, x: Tensor) -> Tensor:
        channels = []
        for c in range(x.shape[1]):
            values = x[:, c]
            count = values.numel()
            mean = values.sum() / count
            variance = ((values - mean) ** 2).sum() / count
            mean = (1 - self.fraction) * self.running_mean[c] + self.fraction * mean
            variance = (1 - self.fraction) * self.running_var[c] + self.fraction * variance
            normal = (values - mean) / (variance + self.eps) ** 0.5
            channels.append(normal * self.weight[c] + self.bias[c])
        return torch.stack(channels, 1)


def naive_copy(net: nn.Sequential, fraction: float) -> nn.Sequential:
    """Return a copy whose BatchNorms are naive ones."""
    net = copy.deepcopy(net).eval()
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm2d):
            net[number] = NaiveBatchNorm(layer, fraction)
    return net


class NaiveAdam:
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.parameters, self.lr, self.betas, self.eps = list(parameters), lr, betas, eps
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0

    def step(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        one, two = self.betas
        for i, gradient in enumerate(gradients):
            self.first[i] = one * self.first[i] + (1 - one) * gradient
            self.second[i] = two * self.second[i] + (1 - two) * gradient**2
            mean = self.first[i] / (1 - one**self.steps)
            variance = self.second[i] / (1 - two**self.steps)
            with torch.no_grad():
                self.parameters[i].sub_(self.lr * mean / (variance.sqrt() + self.eps))


class NaiveNesterov:
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> None:
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        self.velocity: list[Tensor] | None = None

    def step(self, gradients: Sequence[Tensor]) -> None:
        if self.velocity is None:
            self.velocity = [g.clone() for g in gradients]
        else:
            self.velocity = [self.momentum * s + g for s, g in zip(self.velocity, gradients, strict=True)]
        for p, g, s in zip(self.parameters, gradients, self.velocity, strict=True):
            with torch.no_grad():
                p.sub_(self.lr * (g + self.momentum * s))


def add_up(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    for term in others:
        first = first + term
    return first


def elements(logits: Tensor) -> list[Tensor]:
    """Return the vector of logits of every image, or of every pixel."""
    if logits.ndim == 2:
        return [logits[i] for i in range(len(logits))]
    n, _, height, width = logits.shape
    return [logits[i, :, r, c] for i in range(n) for r in range(height) for c in range(width)]


def from_elements(vectors: list[Tensor], like: Tensor) -> Tensor:
    """Return what :func:`elements` took apart."""
    if like.ndim == 2:
        return torch.stack(vectors)
    n, classes, height, width = like.shape
    return torch.stack(vectors).reshape(n, height, width, classes).permute(0, 3, 1, 2)


def probabilities(vector: Tensor) -> list[Tensor]:
    exponentials = [(v - vector.max()).exp() for v in vector]
    return [e / add_up(exponentials) for e in exponentials]


def cross(target: list[Tensor], prediction: list[Tensor]) -> Tensor:
    """Return -sum_c target_c log prediction_c over lists of probabilities."""
    return -add_up(t * p.log() for t, p in zip(target, prediction, strict=True))


def naive_self_training(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    parameters: Callable[[nn.Sequential], list[nn.Parameter]],
    loss: str,
    optimizer: MakeOptimizer,
    fraction: float = 1.0,
) -> tuple[list[Tensor], nn.Sequential]:
    """Run TENT (loss "entropy") or Pseudo-label (loss "argmax")."""
    student = naive_copy(net, fraction)
    trained = parameters(student)
    descent = optimizer(trained)
    predictions: list[Tensor] = []
    for x in batches:
        logits = student(x)
        total = torch.zeros(())
        for vector in elements(logits):
            p = probabilities(vector)
            total = total + (cross(p, p) if loss == "entropy" else -p[int(vector.argmax())].log())
        descent.step(torch.autograd.grad(total / len(elements(logits)), trained))
        predictions.append(logits.detach())
    return predictions, student


def mean_over_views(views: Sequence[View], model: nn.Module, x: Tensor, average: str) -> Tensor:
    predictions = [view(model, x) for view in views]
    if average == "logits":
        return add_up(predictions) / len(predictions)
    vectors = []
    for several in zip(*[elements(prediction) for prediction in predictions], strict=True):
        lists = [probabilities(vector) for vector in several]
        vectors.append(torch.stack([add_up(column) / len(lists) for column in zip(*lists, strict=True)]).log())
    return from_elements(vectors, predictions[0])


def naive_test_aug(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    draw: Callable[[int], Sequence[View]],
    average: str,
    fraction: float = 1.0,
) -> list[Tensor]:
    source = naive_copy(net, fraction)
    with torch.no_grad():
        return [mean_over_views(draw(step), source, x, average) for step, x in enumerate(batches)]


def step_generator(seed: int, step: int, purpose: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def naive_cotta(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    draw: Callable[[int], Sequence[View]],
    gate: str,
    average: str,
    predict_with: str,
    loss: str,
    threshold: float,
    decay: float,
    restore: float,
    optimizer: MakeOptimizer,
    fraction: float = 1.0,
    seed: int = 0,
) -> tuple[list[Tensor], nn.Sequential, nn.Sequential]:
    source, teacher, student = (naive_copy(net, fraction) for _ in range(3))
    trained = list(student.parameters())
    descent = optimizer(trained)
    predictions: list[Tensor] = []
    for step, x in enumerate(batches):
        with torch.no_grad():
            direct = teacher(x)
            confidences = [float(max(probabilities(vector))) for vector in elements(source(x))]
            if gate == "batch":
                confidences = [sum(confidences) / len(confidences)] * len(confidences)
            views = draw(step)
            refined = mean_over_views(views, teacher, x, average) if views else direct
            chosen = [
                averaged if confidence < threshold and views else plain
                for confidence, plain, averaged in zip(confidences, elements(direct), elements(refined), strict=True)
            ]
            target = from_elements(chosen, direct)
        total = torch.zeros(())
        for vector, goal in zip(elements(student(x)), elements(target), strict=True):
            prediction, wanted = probabilities(vector), probabilities(goal)
            if loss == "cross_entropy":
                total = total + cross(wanted, prediction)
            elif loss == "symmetric":
                total = total + cross(wanted, prediction) / 2 + cross(prediction, wanted) / 2
            else:
                total = total - prediction[int(goal.argmax())].log()
        descent.step(torch.autograd.grad(total / len(elements(target)), trained))
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(decay * t + (1 - decay) * s)
            count = sum(p.numel() for p in trained)
            restored = set(bernoulli_positions(count, restore, step_generator(seed, step, "restore")).tolist())
            position = 0
            for s, original in zip(student.parameters(), source.parameters(), strict=True):
                for i in range(s.numel()):
                    if position in restored:
                        index = tuple(int(k) for k in torch.unravel_index(torch.tensor(i), s.shape))
                        s[index] = original[index]
                    position += 1
        predictions.append(target if predict_with == "refined" else direct)
    return predictions, student, teacher


def naive_view(view: ImageView, image: Tensor) -> Tensor:
    """Return one view of one image (3, n, n), computed pixel by pixel and without the noise."""
    n = image.shape[-1]
    image = image.clamp(0, 1)

    def luma(r: int, c: int) -> Tensor:
        return 0.2989 * image[0, r, c] + 0.587 * image[1, r, c] + 0.114 * image[2, r, c]

    for operation in view.color_order:
        if operation == 0:
            image = image * view.brightness
        elif operation == 1:
            mean = add_up(luma(r, c) for r in range(n) for c in range(n)) / n**2
            image = view.contrast * image + (1 - view.contrast) * mean
        elif operation == 2:
            gray = torch.stack([torch.stack([luma(r, c) for c in range(n)]) for r in range(n)])
            image = view.saturation * image + (1 - view.saturation) * gray
        elif operation == 3:
            image = naive_hue(image, view.hue)
        else:
            image = image.clamp(1e-8, 1) ** view.gamma
        image = image.clamp(0, 1)
    pad = n // 2
    size = n + 2 * pad
    padded = torch.stack(
        [
            torch.stack([image[:, min(max(r - pad, 0), n - 1), min(max(c - pad, 0), n - 1)] for c in range(size)], 1)
            for r in range(size)
        ],
        1,
    )
    angle = math.radians(view.degrees)
    shift_x, shift_y = round(view.translate_x * size), round(view.translate_y * size)
    moved = torch.zeros_like(padded)
    middle = (size - 1) / 2
    for r in range(size):
        for c in range(size):
            x, y = c - middle - shift_x, r - middle - shift_y
            from_c = (math.cos(angle) * x + math.sin(angle) * y) / view.scale + middle
            from_r = (-math.sin(angle) * x + math.cos(angle) * y) / view.scale + middle
            left, top = math.floor(from_c), math.floor(from_r)
            for row, row_weight in ((top, 1 - (from_r - top)), (top + 1, from_r - top)):
                for column, column_weight in ((left, 1 - (from_c - left)), (left + 1, from_c - left)):
                    if 0 <= row < size and 0 <= column < size:
                        moved[:, r, c] += row_weight * column_weight * padded[:, row, column]
    taps = [math.exp(-0.5 * (k / view.sigma) ** 2) for k in (-2, -1, 0, 1, 2)]
    taps = [tap / sum(taps) for tap in taps]
    cropped = torch.zeros_like(image)
    for r in range(n):
        for c in range(n):
            for i, vertical in enumerate(taps):
                for j, horizontal in enumerate(taps):
                    cropped[:, r, c] += vertical * horizontal * moved[:, r + pad + i - 2, c + pad + j - 2]
    return cropped.flip(-1) if view.flip else cropped


def naive_hue(image: Tensor, turns: float) -> Tensor:
    result = torch.zeros_like(image)
    for r in range(image.shape[1]):
        for c in range(image.shape[2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[:, r, c].tolist())
            turned = colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value)
            result[:, r, c] = torch.tensor(turned, dtype=image.dtype)
    return result
