"""Independent implementations of further methods with plain loops: PETAL, PALM, TEA and SoTTA.

See naive_entropy.py.
"""

import math
from collections.abc import Callable, Sequence

import torch
from naive import MakeOptimizer, NaiveBatchNorm, add_up, cross, elements, mean_over_views, naive_copy, probabilities
from naive_entropy import Augment, Run, norm_parameters, shannon
from naive_memory import Item, running_copy
from torch import Tensor, nn

from ctta.views import View


def naive_petal(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    draw: Callable[[int], Sequence[View]],
    threshold: float,
    decay: float = 0.999,
    quantile: float = 0.03,
    mean: Sequence[Tensor] | None = None,
    variance: Sequence[Tensor] | None = None,
    prior_weight: float = 1e-9,
    fraction: float = 1.0,
) -> tuple[list[Tensor], nn.Sequential, nn.Sequential]:
    """Run PETAL with restoring by Fisher information; ``mean`` and ``variance`` are those of the posterior."""
    source, teacher, student = (naive_copy(net, fraction) for _ in range(3))
    trained = list(student.parameters())
    descent, predictions = optimizer(trained), []
    for step, x in enumerate(batches):
        with torch.no_grad():
            sure = [float(max(probabilities(vector))) for vector in elements(source(x))]
            is_uncertain = sum(sure) / len(sure) < threshold
            target = mean_over_views(draw(step), teacher, x, "logits") if is_uncertain else teacher(x)
        losses = [
            cross(probabilities(t), probabilities(s))
            for t, s in zip(elements(target), elements(student(x)), strict=True)
        ]
        loss = add_up(losses) / len(losses)
        if mean is not None and variance is not None:
            for p, m, v in zip(trained, mean, variance, strict=True):
                loss = loss + prior_weight / 2 * ((p - m) ** 2 / (v + 1e-6)).sum()
        gradients = torch.autograd.grad(loss, trained)
        descent.step(gradients)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(decay * t + (1 - decay) * s)
            importance = torch.cat([g.square().flatten() for g in gradients])
            limit = importance.quantile(quantile)
            for p, original, g in zip(trained, source.parameters(), gradients, strict=True):
                p.copy_(torch.where(g.square() < limit, original, p))
        predictions.append(target)
    return predictions, student, teacher


def naive_palm(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    lr: float,
    augment: Augment,
    temperature: float = 50.0,
    max_gradient: float = 1.0,
    momentum: float = 0.5,
    max_entropy: float = 0.4,
    consistency: float = 0.01,
    keep_rates: bool = True,
    fraction: float = 1.0,
) -> tuple[list[Tensor], nn.Sequential, int]:
    """Run PALM with its code's new optimizer in every step, that is with sign descent.

    Also returns how often a tensor of a large gradient went on with an earlier rate.
    """
    student = naive_copy(net, fraction)
    trained = [
        parameter
        for layer in student
        if isinstance(layer, NaiveBatchNorm | nn.Conv2d)
        for parameter in layer.parameters()
    ]
    sensitivity, rates = [torch.zeros_like(p) for p in trained], [0.0 for _ in trained]
    predictions, num_kept = [], 0
    for step, x in enumerate(batches):
        logits = student(x)
        flat = [-add_up(p.log() for p in probabilities(vector / temperature)) for vector in elements(logits)]
        gradients = torch.autograd.grad(add_up(flat) / len(flat), trained, retain_graph=True)
        for i, (p, g) in enumerate(zip(trained, gradients, strict=True)):
            if float(g.abs().sum()) > max_gradient:
                rates[i] = rates[i] if keep_rates else 0.0
                num_kept += rates[i] > 0
                continue
            latest = (p * g).abs().detach()
            sensitivity[i] = momentum * sensitivity[i] + (1 - momentum) * latest
            change = ((latest - sensitivity[i]).abs() + 1e-8) / (sensitivity[i] + 1e-8)
            rates[i] = lr * float(change.mean())
        views = student(augment(step, x))
        entropies = [shannon(vector) for vector in elements(logits)]
        sure = [value for value in entropies if value < max_entropy]
        agreement = [
            cross(probabilities(one), probabilities(other))
            for one, other in zip(elements(logits), elements(views), strict=True)
        ]
        loss = consistency * logits.shape[1] * add_up(agreement) / len(agreement)
        if sure:
            loss = loss + add_up(sure) / len(sure)
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for p, g, rate in zip(trained, gradients, rates, strict=True):
                p.sub_(rate * g / (g.abs() + 1e-8))
        predictions.append(logits.detach())
    return predictions, student, num_kept


def naive_tea(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    start: Callable[[int, int], tuple[Tensor, list[int]]],
    write_back: Callable[[list[int], Tensor], None],
    noise: Callable[[int, int, Tensor], Tensor],
    num_steps: int = 20,
    step_size: float = 0.1,
    noise_scale: float = 0.01,
    fraction: float = 1.0,
) -> Run:
    """Run TEA, which predicts after the step; ``start(step, count)`` returns samples and their places in the buffer.

    The authors remove the running statistics, so that samples are normalized by their own batch, also in eval mode.
    """
    student = naive_copy(net, fraction)
    trained = norm_parameters(student)
    descent, predictions = optimizer(trained), []
    for step, x in enumerate(batches):
        samples, places = start(step, len(x))
        for k in range(num_steps):
            samples = samples.detach().requires_grad_()
            energy = add_up(vector.logsumexp(0) for vector in student(samples))
            (gradient,) = torch.autograd.grad(energy, samples)
            samples = samples.detach() + step_size * gradient + noise_scale * noise(step, k, samples)
        write_back(places, samples.detach())
        real = add_up(vector.logsumexp(0) for vector in student(x)) / len(x)
        fake = add_up(vector.logsumexp(0) for vector in student(samples.detach())) / len(samples)
        descent.step(torch.autograd.grad(fake - real, trained))
        with torch.no_grad():
            predictions.append(student(x))
    return predictions, student


class NaiveUniformMemory:
    """SoTTA's memory of confident images, balanced over the predicted classes."""

    def __init__(self, capacity: int, num_classes: int, draw: Callable[[int], int]) -> None:
        self.capacity, self.draw = capacity, draw
        self.classes: list[list[Item]] = [[] for _ in range(num_classes)]

    def add(self, item: Item) -> None:
        sizes = [len(each) for each in self.classes]
        if sum(sizes) >= self.capacity:
            largest = [c for c, size in enumerate(sizes) if size == max(sizes)]
            label = item.label if item.label in largest else largest[self.draw(len(largest))]
            del self.classes[label][self.draw(len(self.classes[label]))]
        self.classes[item.label].append(item)

    def items(self) -> list[Item]:
        return [each for items in self.classes for each in items]


def naive_sotta(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    parameters: Callable[[nn.Sequential], list[nn.Parameter]],
    optimizer: MakeOptimizer,
    memory: NaiveUniformMemory,
    min_confidence: float,
    update_every: int = 64,
    momentum: float = 0.2,
    radius: float = 0.05,
) -> Run:
    """Run SoTTA: every ``update_every`` images a sharpness-aware step on the memory.

    As in the authors' code, both passes of a step are in training mode: the memory normalizes, and the statistics that
    predictions use follow it twice.
    """
    student = running_copy(net, momentum, use_running=False)
    trained = parameters(student)
    descent, predictions, seen = optimizer(trained), list[Tensor](), 0
    for x in batches:
        with torch.no_grad():
            logits = student.eval()(x)
        predictions.append(logits)
        for image, vector in zip(x, logits, strict=True):
            if float(max(probabilities(vector))) >= min_confidence:
                memory.add(Item(image, int(vector.argmax()), 0.0))
            seen += 1
            items = memory.items()
            if seen % update_every or not items:
                continue
            images = torch.stack([item.image for item in items])
            student.train()

            def gradient(images: Tensor = images) -> tuple[Tensor, ...]:
                losses = [shannon(each) for each in student(images)]
                return torch.autograd.grad(add_up(losses) / len(losses), trained)

            first = gradient()
            length = math.sqrt(sum(float(g.square().sum()) for g in first))
            before = [p.detach().clone() for p in trained]
            with torch.no_grad():
                for p, g in zip(trained, first, strict=True):
                    p.add_(radius * g / (length + 1e-12))
            second = gradient()
            with torch.no_grad():
                for p, b in zip(trained, before, strict=True):
                    p.copy_(b)
            descent.step(second)
    return predictions, student
