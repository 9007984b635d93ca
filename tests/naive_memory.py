"""Independent implementations of the methods that keep a memory of images, with plain loops. See naive_entropy.py."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from naive import MakeOptimizer, add_up, cross, probabilities
from naive_entropy import Augment, Run
from naive_features import split
from torch import Tensor, nn


class NaiveRobustNorm(nn.Module):
    """RoTTA's normalization: in training the statistics move toward those of the batch and are used at once."""

    def __init__(self, layer: nn.BatchNorm2d, alpha: float) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.weight, self.bias, self.eps, self.alpha = layer.weight, layer.bias, layer.eps, alpha
        self.mean, self.variance = list(layer.running_mean.clone()), list(layer.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        channels = []
        for c in range(x.shape[1]):
            values = x[:, c]
            mean, variance = self.mean[c], self.variance[c]
            if self.training:
                batch_mean = values.mean()
                batch_variance = ((values - batch_mean) ** 2).mean()
                mean = (1 - self.alpha) * mean + self.alpha * batch_mean
                variance = (1 - self.alpha) * variance + self.alpha * batch_variance
                self.mean[c], self.variance[c] = mean.detach(), variance.detach()
            channels.append((values - mean) / (variance + self.eps) ** 0.5 * self.weight[c] + self.bias[c])
        return torch.stack(channels, 1)


def robust_copy(net: nn.Sequential, alpha: float) -> nn.Sequential:
    net = copy.deepcopy(net).eval()
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm2d):
            net[number] = NaiveRobustNorm(layer, alpha)
    return net


def robust_parameters(net: nn.Sequential) -> list[nn.Parameter]:
    return [p for layer in net if isinstance(layer, NaiveRobustNorm) for p in (layer.weight, layer.bias)]


@dataclass
class Item:
    image: Tensor
    label: int
    uncertainty: float
    age: int = 0


class NaiveTimelyMemory:
    """RoTTA's category-balanced memory with timeliness and uncertainty."""

    def __init__(self, capacity: int, num_classes: int) -> None:
        self.capacity, self.num_classes = capacity, num_classes
        self.classes: list[list[Item]] = [[] for _ in range(num_classes)]

    def score(self, item: Item) -> float:
        timeliness = 1 / (1 + math.exp(-item.age / self.capacity))
        return timeliness + item.uncertainty / math.log(self.num_classes)

    def add(self, item: Item) -> None:
        own = self.classes[item.label]
        size = sum(map(len, self.classes))
        if len(own) >= self.capacity / self.num_classes:
            fits = self.evict([item.label], item)
        elif size < self.capacity:
            fits = True
        else:
            largest = max(map(len, self.classes))
            fits = self.evict([c for c, each in enumerate(self.classes) if len(each) == largest], item)
        if fits:
            own.append(item)
        for each in self.items():
            each.age += 1

    def evict(self, labels: list[int], newcomer: Item) -> bool:
        """Remove the worst of these classes, the last of equals, if it is worse than the newcomer."""
        worst: tuple[float, int, int] | None = None
        for label in labels:
            for index, each in enumerate(self.classes[label]):
                if worst is None or self.score(each) >= worst[0]:
                    worst = (self.score(each), label, index)
        if worst is None:
            return True
        if worst[0] > self.score(newcomer):
            del self.classes[worst[1]][worst[2]]
            return True
        return False

    def items(self) -> list[Item]:
        return [each for items in self.classes for each in items]


def naive_rotta(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    augment: Augment,
    capacity: int = 64,
    update_every: int = 64,
    decay: float = 0.999,
    alpha: float = 0.05,
) -> tuple[list[Tensor], nn.Sequential, nn.Sequential]:
    """Run RoTTA. ``augment(update, images)`` is numbered by updates; images come class by class, oldest first."""
    student, teacher = robust_copy(net, alpha), robust_copy(net, alpha)
    trained = robust_parameters(student)
    descent, predictions, memory, seen, updates = optimizer(trained), list[Tensor](), None, 0, 0
    for x in batches:
        with torch.no_grad():
            logits = teacher.eval()(x)
        predictions.append(logits)
        memory = memory or NaiveTimelyMemory(capacity, logits.shape[1])
        for image, vector in zip(x, logits, strict=True):
            p = probabilities(vector)
            uncertainty = -sum(float(each) * math.log(float(each) + 1e-6) for each in p)
            memory.add(Item(image, int(vector.argmax()), uncertainty))
            seen += 1
            if seen % update_every == 0:
                items = memory.items()
                images = torch.stack([item.image for item in items])
                with torch.no_grad():
                    target = teacher.train()(images)
                output = student.train()(augment(updates, images))
                losses = []
                for item, t, s in zip(items, target, output, strict=True):
                    decayed = math.exp(-item.age / capacity)
                    losses.append(decayed / (1 + decayed) * cross(probabilities(t), probabilities(s)))
                descent.step(torch.autograd.grad(add_up(losses) / len(losses), trained))
                with torch.no_grad():
                    for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                        t.copy_(decay * t + (1 - decay) * s)
                updates += 1
    return predictions, student, teacher


def naive_petta(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    augment: Augment,
    means: Tensor,
    variances: Tensor,
    capacity: int = 64,
    alpha: float = 0.05,
    regularization: float = 10.0,
    teacher_rate: float = 1e-3,
    loss: str = "symmetric",
    divergence: str = "official",
) -> tuple[list[Tensor], nn.Sequential, nn.Sequential, list[float]]:
    """Run PeTTA with one update per batch; returns the divergences as well.

    ``means`` and ``variances`` of source features are (classes, features).
    """
    student, teacher, source = (robust_copy(net, alpha) for _ in range(3))
    trained = robust_parameters(student)
    original = [p.detach().clone() for p in trained]
    running = [mean.clone() for mean in means]
    descent, predictions, gammas, memory = optimizer(trained), list[Tensor](), list[float](), None
    for step, x in enumerate(batches):
        with torch.no_grad():
            body, head = split(teacher.eval())
            features = body(x)
            logits = head(features)
        predictions.append(logits)
        memory = memory or NaiveTimelyMemory(capacity, logits.shape[1])
        for image, vector in zip(x, logits, strict=True):
            p = probabilities(vector)
            uncertainty = -sum(float(each) * math.log(float(each) + 1e-6) for each in p)
            memory.add(Item(image, int(vector.argmax()), uncertainty))
        images = torch.stack([item.image for item in memory.items()])
        views = augment(step, images)
        with torch.no_grad():
            t_logits, anchor = teacher.train()(images), source.train()(images)
        labels = [int(vector.argmax()) for vector in logits]
        present = sorted(set(labels))
        # Of the means before this batch, as in the authors' code; all classes have as many features.
        distances = [float(((running[c] - means[c]) ** 2 / (variances[c] + 1e-6)).mean()) for c in present]
        if divergence == "official":
            gamma = 1 - math.exp(-sum(distances) / len(distances))
        else:
            gamma = sum(1 - math.exp(-distance) for distance in distances) / len(distances)
        gammas.append(gamma)
        s_logits, a_logits = student.train()(images), student(views)
        terms = []
        for t, s, a, o in zip(t_logits, s_logits, a_logits, anchor, strict=True):
            pt, ps, pa, po = (probabilities(each) for each in (t, s, a, o))
            if loss == "symmetric":
                terms.append((cross(pt, ps) + cross(ps, pt) + cross(pt, pa) + cross(pa, pt)) / 4 + cross(po, pa))
            else:
                terms.append(cross(pt, pa) + cross(po, pa))
        similarity = [
            (p.flatten() * q.flatten()).sum() / (p.norm() * q.norm()) for p, q in zip(trained, original, strict=True)
        ]
        total = add_up(terms) / len(terms) - gamma * regularization * add_up(similarity) / len(similarity)
        descent.step(torch.autograd.grad(total, trained))
        rate = (1 - gamma) * teacher_rate
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_((1 - rate) * t + rate * s)
        for c in present:
            mean = torch.stack([f for f, label in zip(features, labels, strict=True) if label == c]).mean(0)
            running[c] = 0.95 * running[c] + 0.05 * mean
    return predictions, student, teacher, gammas


class NaiveRunningNorm(nn.Module):
    """BatchNorm with running statistics; in training the batch normalizes, and the statistics follow with momentum."""

    def __init__(self, layer: nn.BatchNorm2d, momentum: float, use_running: bool) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.weight, self.bias, self.eps, self.momentum = layer.weight, layer.bias, layer.eps, momentum
        self.mean, self.variance = layer.running_mean.clone(), layer.running_var.clone()
        self.use_running = use_running

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        if self.training:
            count = x.numel() // x.shape[1]
            unbiased = variance.detach() * count / (count - 1)
            self.mean = (1 - self.momentum) * self.mean + self.momentum * mean.detach()
            self.variance = (1 - self.momentum) * self.variance + self.momentum * unbiased
        if not self.training or self.use_running:
            mean, variance = self.mean, self.variance
        shape = (1, -1, 1, 1)
        normal = (x - mean.view(shape)) / (variance.view(shape) + self.eps).sqrt()
        return normal * self.weight.view(shape) + self.bias.view(shape)


def running_copy(net: nn.Sequential, momentum: float, use_running: bool) -> nn.Sequential:
    net = copy.deepcopy(net).eval()
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm2d):
            net[number] = NaiveRunningNorm(layer, momentum, use_running)
    return net


class NaiveBalancedReservoir:
    """NOTE's prediction-balanced reservoir; ``draw(n)`` is a random integer below n, ``chance()`` uniform in [0, 1)."""

    def __init__(
        self, capacity: int, num_classes: int, draw: Callable[[int], int], chance: Callable[[], float]
    ) -> None:
        self.capacity, self.draw, self.chance = capacity, draw, chance
        self.classes: list[list[Tensor]] = [[] for _ in range(num_classes)]
        self.seen = [0] * num_classes

    def add(self, image: Tensor, label: int) -> None:
        self.seen[label] += 1
        sizes = [len(each) for each in self.classes]
        if sum(sizes) < self.capacity:
            self.classes[label].append(image)
            return
        largest = [c for c, size in enumerate(sizes) if size == max(sizes)]
        if label not in largest:
            victims = self.classes[largest[self.draw(len(largest))]]
        elif self.chance() <= sizes[label] / self.seen[label]:
            victims = self.classes[label]
        else:
            return
        del victims[self.draw(len(victims))]
        self.classes[label].append(image)

    def images(self) -> Sequence[Tensor]:
        return [each for images in self.classes for each in images]


class NaiveLatest:
    """The latest images."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.kept = capacity, list[Tensor]()

    def add(self, image: Tensor, label: int) -> None:
        self.kept = [*self.kept, image][-self.capacity :]

    def images(self) -> Sequence[Tensor]:
        return self.kept


class NaiveInstanceAwareNorm(nn.Module):
    """Normalizes each channel of each image by the batch's statistics, moved toward those of the image."""

    def __init__(self, layer: nn.BatchNorm2d, k: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.k = layer.weight, layer.bias, layer.eps, k

    def forward(self, x: Tensor) -> Tensor:
        size, rows = x[0, 0].numel(), []
        for image in x:
            channels = []
            for c, values in enumerate(image):
                mean, variance = x[:, c].mean(), x[:, c].var(correction=1)
                bounds = self.k * ((variance + self.eps) / size).sqrt(), variance + self.eps
                own_mean, own_variance = values.mean() - mean, values.var(correction=1) - variance
                mean = mean + self.shrink(own_mean, bounds[0])
                variance = variance + self.shrink(own_variance, self.k * bounds[1] * math.sqrt(2 / (size - 1)))
                normal = (values - mean) / (variance.clamp_min(0) + self.eps).sqrt()
                channels.append(normal * self.weight[c] + self.bias[c])
            rows.append(torch.stack(channels))
        return torch.stack(rows)

    @staticmethod
    def shrink(value: Tensor, bound: Tensor) -> Tensor:
        return value - bound if value > bound else value + bound if value < -bound else 0 * value


def naive_note_iid(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    capacity: int,
    update_every: int,
    iabn: float,
) -> Run:
    """Run NOTE*: every batch is normalized by itself, and the latest images are learned from."""
    student, memory, seen = copy.deepcopy(net).eval(), NaiveLatest(capacity), 0
    for number, layer in enumerate(student):
        if isinstance(layer, nn.BatchNorm2d):
            student[number] = NaiveInstanceAwareNorm(layer, iabn)
    trained = [p for layer in student if isinstance(layer, NaiveInstanceAwareNorm) for p in (layer.weight, layer.bias)]
    descent, predictions = optimizer(trained), list[Tensor]()
    for x in batches:
        predictions.append(student(x).detach())
        for image in x:
            memory.add(image, 0)
            seen += 1
            if seen % update_every == 0:
                output = student(torch.stack(list(memory.images())))
                losses = [-add_up(p * (p + 1e-6).log() for p in probabilities(vector)) for vector in output]
                descent.step(torch.autograd.grad(add_up(losses) / len(losses) / output.shape[1], trained))
    return predictions, student


def naive_note(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    memory: "NaiveBalancedReservoir | NaiveLatest",
    update_every: int = 64,
    momentum: float = 0.01,
    use_running: bool = True,
    average_over_classes: bool = True,
    by_batch: bool = False,
) -> Run:
    """Run NOTE on a network without instance-aware normalization: single predictions, one step per memory."""
    student = running_copy(net, momentum, use_running)
    trained = [p for layer in student if isinstance(layer, NaiveRunningNorm) for p in (layer.weight, layer.bias)]
    descent, predictions, seen = optimizer(trained), list[Tensor](), 0
    for x in batches:
        with torch.no_grad():
            logits = student.train(by_batch)(x)
        predictions.append(logits)
        for image, vector in zip(x, logits, strict=True):
            memory.add(image, int(vector.argmax()))
            seen += 1
            if seen % update_every == 0:
                output = student.train()(torch.stack(list(memory.images())))
                losses = [-add_up(p * (p + 1e-6).log() for p in probabilities(vector)) for vector in output]
                loss = add_up(losses) / len(losses) / (output.shape[1] if average_over_classes else 1)
                descent.step(torch.autograd.grad(loss, trained))
    return predictions, student


def naive_bn_alpha(net: nn.Sequential, batches: list[Tensor], *, alpha: float) -> list[Tensor]:
    """Normalize by (1-alpha) * source + alpha * batch statistics, with the unbiased batch variance."""
    predictions = []
    for x in batches:
        student = copy.deepcopy(net).eval()
        with torch.no_grad():
            for layer in student:
                if isinstance(layer, nn.BatchNorm2d):
                    assert layer.running_mean is not None and layer.running_var is not None
                    layer.running_mean.lerp_(x.mean((0, 2, 3)), alpha)
                    layer.running_var.lerp_(x.var((0, 2, 3), correction=1), alpha)
                x = layer(x)
        predictions.append(x)
    return predictions


def naive_bn_ema(net: nn.Sequential, batches: list[Tensor], *, momentum: float) -> list[Tensor]:
    """Update the running statistics by a pass in training mode, then predict with them."""
    student, predictions = running_copy(net, momentum, use_running=False), []
    with torch.no_grad():
        for x in batches:
            student.train()(x)
            predictions.append(student.eval()(x))
    return predictions
