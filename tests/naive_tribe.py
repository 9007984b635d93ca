"""An independent implementation of TRIBE with plain loops. See naive_entropy.py."""

import copy
import math

import torch
from naive import MakeOptimizer, add_up, probabilities
from naive_entropy import Augment, shannon
from torch import Tensor, nn


class NaiveBalancedNorm(nn.Module):
    """Normalization by the mean over classes of statistics that each class keeps; ``labels`` is set to update them."""

    def __init__(self, layer: nn.BatchNorm2d, num_classes: int, momentum: float, spread: float) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.num_classes, self.momentum, self.spread = num_classes, momentum, spread
        self.mean, self.variance = layer.running_mean.clone(), layer.running_var.clone()
        self.means = [list(self.mean) for _ in range(num_classes)]
        self.variances = [list(self.variance) for _ in range(num_classes)]
        self.labels: list[int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        channels, labels = [], self.labels
        for c in range(x.shape[1]):
            mean, variance = self.mean[c], self.variance[c]
            if labels is not None:
                mean, variance = self.update(x[:, c], labels, c)
            channels.append((x[:, c] - mean) / (variance + self.eps) ** 0.5 * self.weight[c] + self.bias[c])
        self.labels = None
        return torch.stack(channels, 1)

    def update(self, values: Tensor, labels: list[int], c: int) -> tuple[Tensor, Tensor]:
        present = sorted(set(labels))
        means = [self.means[k][c] for k in range(self.num_classes)]
        variances = [self.variances[k][c] for k in range(self.num_classes)]
        moves, squares, rates = {}, {}, {}
        for k in present:
            own = [values[i] for i, label in enumerate(labels) if label == k]
            rate = 1 / len(own) if len(own) > 1 / self.momentum else self.momentum
            moves[k] = rate * add_up((image - means[k]).mean() for image in own)
            squares[k] = rate * add_up(((image - means[k]) ** 2).mean() for image in own)
            rates[k] = rate * len(own)
        gap = add_up(squares[k] - moves[k] ** 2 for k in present) / len(present)
        rate = sum(rates.values()) / len(present)
        for k in present:
            means[k] = means[k] + (1 - self.spread) * moves[k]
            variances[k] = variances[k] + (1 - self.spread) * (squares[k] - rates[k] * variances[k] - moves[k] ** 2)
        for k in range(self.num_classes):
            means[k] = means[k] + self.spread * add_up(moves.values()) / len(present)
            variances[k] = variances[k] + self.spread * (gap - rate * variances[k])
            self.means[k][c], self.variances[k][c] = means[k].detach(), variances[k].detach()
        mean = add_up(means) / self.num_classes
        between = add_up((each - mean) ** 2 for each in means) / (self.num_classes - 1)
        variance = add_up(variances) / self.num_classes + between
        self.mean[c], self.variance[c] = mean.detach(), variance.detach()
        return mean, variance


def balanced_copy(net: nn.Sequential, num_classes: int, momentum: float, spread: float) -> nn.Sequential:
    net = copy.deepcopy(net).eval()
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm2d):
            net[number] = NaiveBalancedNorm(layer, num_classes, momentum, spread)
    return net


def naive_tribe(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    augment: Augment,
    num_classes: int,
    momentum: float = 0.01,
    spread: float = 0.0,
    max_entropy: float = 0.05,
    anchor: float = 0.5,
) -> tuple[list[Tensor], nn.Sequential, nn.Sequential, list[int]]:
    """Run TRIBE; returns the predictions, student, teacher, and how many images of each batch were learned from."""
    student, teacher, source = (balanced_copy(net, num_classes, momentum, spread) for _ in range(3))
    trained: list[nn.Parameter] = []
    for own, tied in zip(student, teacher, strict=True):
        if isinstance(own, NaiveBalancedNorm) and isinstance(tied, NaiveBalancedNorm):
            tied.weight, tied.bias = own.weight, own.bias
            trained += [own.weight, own.bias]
    descent, predictions, learned = optimizer(trained), list[Tensor](), list[int]()
    for step, x in enumerate(batches):
        with torch.no_grad():
            predictions.append(teacher(x))
        labels = [int(vector.argmax()) for vector in predictions[-1]]
        for network in (student, teacher, source):
            for layer in network:
                if isinstance(layer, NaiveBalancedNorm):
                    layer.labels = labels
        targets, outputs = teacher(x), student(augment(step, x))
        with torch.no_grad():
            anchors = source(x)
        losses = []
        for t, s, a in zip(targets, outputs, anchors, strict=True):
            if shannon(t) < max_entropy * math.log(num_classes):
                hard = -probabilities(s)[int(t.argmax())].log()
                losses.append(hard + anchor * add_up((t[c] - a[c]) ** 2 for c in range(num_classes)) / num_classes)
        learned.append(len(losses))
        if losses:
            descent.step(torch.autograd.grad(add_up(losses) / len(losses), trained))
    return predictions, student, teacher, learned
