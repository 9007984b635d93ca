"""Independent implementations of the methods that use features and the classifier, with plain loops.

The features are the input of the last layer of a sequential network. See naive_entropy.py.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from naive import MakeOptimizer, add_up, cross, elements, naive_copy, probabilities
from naive_entropy import Augment, Run, cosine, norm_parameters, shannon
from torch import Tensor, nn


def split(net: nn.Sequential) -> tuple[nn.Sequential, nn.Linear]:
    """Return the layers before the head, and the head."""
    head = net[-1]
    assert isinstance(head, nn.Linear)
    return nn.Sequential(*list(net)[:-1]), head


def unit(vector: Tensor) -> Tensor:
    return vector / vector.square().sum().sqrt().clamp_min(1e-12)


def naive_lame(
    net: nn.Sequential, batches: list[Tensor], *, num_neighbors: int = 5, max_iterations: int = 100
) -> list[Tensor]:
    """Run LAME with the RBF affinity; returns log-probabilities."""
    source = naive_copy(net, 0.0)
    body, head = split(source)
    predictions = []
    for x in batches:
        with torch.no_grad():
            features = [unit(each) for each in body(x)]
            vectors = [torch.stack(probabilities(head(each))) for each in body(x)]
            count = len(features)
            squared = [[float((a - b).square().sum()) for b in features] for a in features]
            neighbor = min(num_neighbors, count) - 1  # the nearest is the image itself
            width = sum(math.sqrt(sorted(row)[neighbor]) for row in squared) / count
            affinity = [[math.exp(-value / (2 * width**2)) if width > 0 else 1.0 for value in row] for row in squared]
            unary = [[-math.log(float(p) + 1e-10) for p in vector] for vector in vectors]
            num_classes = len(unary[0])
            labels = [softmax([-u for u in row]) for row in unary]
            energy_before = math.inf
            for iteration in range(max_iterations):
                pairwise = [
                    [sum(affinity[i][j] * labels[j][c] for j in range(count)) for c in range(num_classes)]
                    for i in range(count)
                ]
                labels = [softmax([k - u for k, u in zip(pairwise[i], unary[i], strict=True)]) for i in range(count)]
                energy = sum(
                    unary[i][c] * labels[i][c]
                    - pairwise[i][c] * labels[i][c]
                    + labels[i][c] * math.log(max(labels[i][c], 1e-20))
                    for i in range(count)
                    for c in range(num_classes)
                )
                if iteration > 1 and abs(energy - energy_before) <= 1e-8 * abs(energy_before):
                    break
                energy_before = energy
            predictions.append(torch.tensor(labels, dtype=x.dtype).log())
    return predictions


def softmax(values: Sequence[float]) -> list[float]:
    exponentials = [math.exp(value - max(values)) for value in values]
    return [e / sum(exponentials) for e in exponentials]


def naive_tda(net: nn.Sequential, batches: list[Tensor], *, weight: float, num_negative: int) -> list[Tensor]:
    """Run TDA with the other settings of ImageNet: the caches take one image after the other, and then all predict."""
    body, head = split(naive_copy(net, 0.0))
    num_classes, predictions = len(head.weight), []
    certain: list[list[tuple[float, Tensor]]] = [[] for _ in range(num_classes)]
    unsure: list[list[tuple[float, Tensor, list[int]]]] = [[] for _ in range(num_classes)]

    def add(cache: list[Any], entry: Any, size: int) -> None:
        if len(cache) < size:
            cache.append(entry)
        elif size and entry[0] < max(each[0] for each in cache):
            worst = max(range(size), key=lambda place: cache[place][0])
            cache[worst] = entry

    with torch.no_grad():
        for x in batches:
            features = [unit(feature) for feature in body(x)]
            logits = [head(feature) for feature in body(x)]
            for feature, row in zip(features, logits, strict=True):
                p, entropy, label = probabilities(row), float(shannon(row)), int(row.argmax())
                add(certain[label], (entropy, feature), 3)
                if 0.2 < entropy / math.log2(num_classes) < 0.5:
                    possible = [c for c in range(num_classes) if 0.03 < float(p[c]) < 1]
                    add(unsure[label], (entropy, feature, possible), num_negative)
            answers = []
            for feature, row in zip(features, logits, strict=True):
                answer = row.clone()
                for label in range(num_classes):
                    for _, key in certain[label]:
                        answer[label] += weight * math.exp(-5 * (1 - float(feature @ key)))
                    for _, key, possible in unsure[label]:
                        for c in possible:
                            answer[c] -= 0.117 * math.exp(-(1 - float(feature @ key)))
                answers.append(answer)
            predictions.append(torch.stack(answers))
    assert not num_negative or any(unsure), "some images are uncertain"
    return predictions


def naive_dota(net: nn.Sequential, batches: list[Tensor], *, rate: float, most: float) -> list[Tensor]:
    """Run DOTA with a covariance for each class, whose mean by the counts is inverted."""
    body, head = split(naive_copy(net, 0.0))
    means = [unit(row) for row in head.weight.detach()]
    num_classes, width = len(means), len(means[0])
    identity = torch.eye(width, dtype=head.weight.dtype)
    counts, covariances = [1.0] * num_classes, [1e-4 * identity] * num_classes
    predictions = []
    with torch.no_grad():
        for x in batches:
            features = [unit(feature) for feature in body(x)]
            logits = [head(feature) for feature in body(x)]
            pooled = add_up(count * each for count, each in zip(counts, covariances, strict=True)) / sum(counts)
            inverse = torch.linalg.inv((1 - 1e-3) * pooled + 1e-3 * identity)
            weight = min(rate * sum(counts) / num_classes, most)
            predictions.append(
                torch.stack(
                    [
                        row + weight * torch.stack([f @ inverse @ m - m @ inverse @ m / 2 for m in means])
                        for f, row in zip(features, logits, strict=True)
                    ]
                )
            )
            labels = [probabilities(row) for row in logits]
            for c in range(num_classes):
                added = sum(float(p[c]) for p in labels)
                scatter = add_up(
                    p[c] * torch.outer(f - means[c], f - means[c]) for f, p in zip(features, labels, strict=True)
                )
                covariances[c] = (counts[c] * covariances[c] + scatter) / (counts[c] + added)
                total = add_up(p[c] * f for f, p in zip(features, labels, strict=True))
                means[c] = (total + counts[c] * means[c]) / (counts[c] + added)
                counts[c] += added
    return predictions


def naive_t3a(net: nn.Sequential, batches: list[Tensor], *, num_supports: int) -> list[Tensor]:
    """Run T3A; ``num_supports`` of 0 keeps all."""
    source = naive_copy(net, 0.0)
    body, head = split(source)
    supports: list[tuple[int, float, Tensor]] = []  # class, entropy, feature

    def add(feature: Tensor, logits: Tensor) -> None:
        supports.append((int(logits.argmax()), float(shannon(logits)), feature))

    predictions = []
    with torch.no_grad():
        for row in head.weight:
            add(row, head(row))
        for x in batches:
            features = body(x)
            for feature in features:
                add(feature, head(feature))
            num_classes = len(head.weight)
            if num_supports:
                supports = [
                    each
                    for c in range(num_classes)
                    for each in sorted((s for s in supports if s[0] == c), key=lambda s: s[1])[:num_supports]
                ]
            columns = []
            for c in range(num_classes):
                members = [unit(feature) for label, _, feature in supports if label == c]
                columns.append(unit(add_up(members)) if members else torch.zeros_like(features[0]))
            predictions.append(torch.stack([torch.stack([(f * column).sum() for column in columns]) for f in features]))
    return predictions


def naive_neo(
    net: nn.Sequential, batches: list[Tensor], *, decay: float | None = None, target: Tensor | None = None
) -> list[Tensor]:
    """Run NEO, image by image; ``target`` is the mean feature of source images."""
    body, head = split(naive_copy(net, 0.0))
    predictions, seen, center = [], list[Tensor](), torch.zeros(head.in_features, dtype=head.weight.dtype)
    for x in batches:
        with torch.no_grad():
            features = list(body(x))
            seen += features
            if decay is None:
                center = add_up(seen) / len(seen)
            else:
                center = decay * center + (1 - decay) * add_up(features) / len(features)
            moved = [feature - center + (0 if target is None else target) for feature in features]
            predictions.append(torch.stack([head(feature) for feature in moved]))
    return predictions


class NaiveUnmixed(nn.Module):
    """A BatchNorm in UnMix-TNS, image by image, channel by channel and component by component."""

    def __init__(self, layer: nn.BatchNorm2d, num_components: int, noise: Tensor, momentum: float, full: int) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.layer, self.momentum, self.full = layer, momentum, full
        count, between = num_components, 0.5 if num_components > 1 else 0.0
        ratio = between * count / max(count - 1, 1)
        pairs = list(zip(layer.running_mean.tolist(), layer.running_var.tolist(), strict=True))
        self.means = [
            [mean + math.sqrt(ratio) * math.sqrt(var) * float(noise[k, c]) for c, (mean, var) in enumerate(pairs)]
            for k in range(count)
        ]
        self.variances = [[(1 - between) * var for _, var in pairs] for _ in range(count)]

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows, shares = [], []
        moments = [[(float(c.mean()), float(c.var(correction=0))) for c in image] for image in x]
        for image, own in zip(x, moments, strict=True):
            mean_vector = torch.tensor([mean for mean, _ in own], dtype=x.dtype)
            cosines = [float(unit(mean_vector) @ unit(torch.tensor(m, dtype=x.dtype))) for m in self.means]
            p = softmax([cosine / 0.07 for cosine in cosines])
            shares.append(p)
            channels = []
            for c, (mean, variance) in enumerate(own):
                means = [(1 - q) * m[c] + q * mean for q, m in zip(p, self.means, strict=True)]
                variances = [(1 - q) * v[c] + q * variance for q, v in zip(p, self.variances, strict=True)]
                mixed = sum(means) / len(means)
                total = sum(variances) / len(means) + sum(m * m for m in means) / len(means) - mixed * mixed
                normal = (image[c] - mixed) / math.sqrt(total + self.layer.eps)
                channels.append(normal * self.layer.weight[c] + self.layer.bias[c])
            rows.append(torch.stack(channels))
        rate = 1 - (1 - self.momentum) ** (len(x) / self.full)
        for k in range(len(self.means)):
            for c in range(x.shape[1]):
                changes = [
                    (p[k] * (own[c][0] - self.means[k][c]), p[k] * (own[c][1] - self.variances[k][c]))
                    for p, own in zip(shares, moments, strict=True)
                ]
                self.means[k][c] += rate * sum(change for change, _ in changes) / len(x)
                self.variances[k][c] += rate * sum(change for _, change in changes) / len(x)
        return torch.stack(rows)


def contrast(groups: Sequence[Sequence[Tensor]], temperature: float) -> Tensor:
    """Return the supervised contrastive loss: the members of a group are each other's positives."""
    vectors = [(i, unit(vector)) for i, group in enumerate(groups) for vector in group]
    losses = []
    for a, (group, anchor) in enumerate(vectors):
        logits = {b: (anchor * other).sum() / temperature for b, (_, other) in enumerate(vectors) if b != a}
        total = torch.stack(list(logits.values())).logsumexp(0)
        positives = [logits[b] - total for b, (other, _) in enumerate(vectors) if b != a and other == group]
        losses.append(-add_up(positives) / len(positives))
    return add_up(losses) / len(losses)


def nearest(feature: Tensor, prototypes: Tensor) -> Tensor:
    return prototypes[max(range(len(prototypes)), key=lambda c: float(cosine(feature.detach(), prototypes[c])))]


def naive_santa(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    projector: nn.Module,
    prototypes: Tensor,
    augment: Augment,
    temperature: float = 0.1,
    contrast_weight: float = 1.0,
    fraction: float = 1.0,
) -> Run:
    """Run SANTA: the student's distribution is the target, and the anchor's is inside the logarithm."""
    student, anchor = naive_copy(net, fraction), naive_copy(net, fraction)
    projector = copy.deepcopy(projector)
    body, head = split(student)
    trained = norm_parameters(student) + list(projector.parameters())
    descent, predictions = optimizer(trained), []
    for step, x in enumerate(batches):
        features, views = body(x), body(augment(step, x))
        logits, logits_of_views = head(features), head(views)
        with torch.no_grad():
            anchored = [probabilities(vector) for vector in elements(anchor(x))]
        losses = [
            cross(probabilities(s), q) / 2 + cross(probabilities(a), q) / 2
            for s, a, q in zip(logits, logits_of_views, anchored, strict=True)
        ]
        groups = [
            [projector(each) for each in (nearest(f, prototypes), f, v)] for f, v in zip(features, views, strict=True)
        ]
        loss = add_up(losses) / len(losses) + contrast_weight * contrast(groups, temperature)
        descent.step(torch.autograd.grad(loss, trained))
        predictions.append(logits.detach())
    return predictions, student


def naive_rmt(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    projector: nn.Module,
    prototypes: Tensor,
    augment: Augment,
    decay: float = 0.999,
    temperature: float = 0.1,
    contrast_weight: float = 1.0,
    fraction: float = 1.0,
    replay: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    replay_weight: float = 1.0,
    warm_up: Sequence[Tensor] = (),
) -> tuple[list[Tensor], nn.Sequential, nn.Sequential]:
    """Run RMT; ``replay`` returns the source images of a step and their classes. Returns student plus teacher logits.

    The warm-up needs SGD: the projector gets a gradient of zero in it, which Adam would count as a step.
    """
    student, teacher = naive_copy(net, fraction), naive_copy(net, fraction)
    projector = copy.deepcopy(projector)
    body, head = split(student)
    trained = [*student.parameters(), *projector.parameters()]
    descent, predictions = optimizer(trained), []

    def update(loss: Tensor, rate: float) -> None:
        gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
        before = [p.detach().clone() for p in trained]
        descent.step(gradients)
        with torch.no_grad():
            for p, old in zip(trained, before, strict=True):
                p.copy_(old + rate * (p - old))
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(decay * t + (1 - decay) * s)

    for number, x in enumerate(warm_up):
        losses = []
        for s, t in zip(student(x), teacher(x).detach(), strict=True):
            ps, pt = probabilities(s), probabilities(t)
            losses.append((cross(pt, ps) + cross(ps, pt)) / 2)
        update(add_up(losses) / len(losses), (number + 1) / len(warm_up))
    for step, x in enumerate(batches):
        features, views = body(x), body(augment(step, x))
        logits, logits_of_views = head(features), head(views)
        with torch.no_grad():
            target = teacher(x)
        losses = []
        for s, a, t in zip(logits, logits_of_views, target, strict=True):
            ps, pa, pt = probabilities(s), probabilities(a), probabilities(t)
            symmetric = [(cross(pt, p) + cross(p, pt)) / 2 for p in (ps, pa)]
            losses.append((symmetric[0] + symmetric[1]) / 2)
        groups = [
            [projector(each) for each in (nearest(f, prototypes), f, v)] for f, v in zip(features, views, strict=True)
        ]
        loss = add_up(losses) / len(losses) + contrast_weight * contrast(groups, temperature)
        if replay is not None:
            images, labels = replay(step)
            known = [-probabilities(vector)[int(c)].log() for vector, c in zip(student(images), labels, strict=True)]
            loss = loss + replay_weight * add_up(known) / len(known)
        update(loss, 1.0)
        predictions.append(logits.detach() + target)
    return predictions, student, teacher


def naive_memo(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    lr: float,
    make_views: Augment,
    num_views: int,
    fraction: float = 1 / 17,
) -> list[Tensor]:
    """Run MEMO: for each image alone one step from the source on its views, then predict the image itself.

    ``make_views(step, images)`` gets each image ``num_views`` times: the copies of the first, then of the second, ...
    """
    predictions = []
    for step, x in enumerate(batches):
        views = make_views(step, x.repeat_interleave(num_views, 0)).split(num_views)
        rows = []
        for image, several in zip(x, views, strict=True):
            student = naive_copy(net, fraction)
            trained = list(student.parameters())
            mean = torch.stack([torch.stack(probabilities(vector)) for vector in student(several)]).mean(0)
            gradients = torch.autograd.grad(-add_up(p * p.log() for p in mean), trained)
            with torch.no_grad():
                for p, g in zip(trained, gradients, strict=True):
                    p.sub_(lr * g)
                rows.append(student(image.unsqueeze(0))[0])
        predictions.append(torch.stack(rows))
    return predictions


class NaiveTrainedNorm(nn.Module):
    """Normalizes by the batch and follows it with running statistics while tracking; otherwise by the latter."""

    def __init__(self, layer: nn.BatchNorm2d, momentum: float) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None
        self.weight, self.bias, self.eps, self.momentum = layer.weight, layer.bias, layer.eps, momentum
        self.mean, self.variance = list(layer.running_mean), list(layer.running_var)
        self.is_tracking = False

    def forward(self, x: Tensor) -> Tensor:
        channels = []
        for c in range(x.shape[1]):
            values, mean, variance = x[:, c], self.mean[c], self.variance[c]
            if self.is_tracking:
                count = values.numel()
                mean = values.sum() / count
                squares = ((values - mean) ** 2).sum()
                variance = squares / count
                kept, new = 1 - self.momentum, self.momentum
                self.mean[c] = kept * self.mean[c] + new * mean.detach()
                self.variance[c] = kept * self.variance[c] + new * squares.detach() / (count - 1)
            channels.append((values - mean) / (variance + self.eps).sqrt() * self.weight[c] + self.bias[c])
        return torch.stack(channels, 1)


def naive_adacontrast(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    weak: Augment,
    query: Augment,
    key: Augment,
    queue: list[tuple[Tensor, int]],
    bank_size: int,
    num_neighbors: int,
    start_after: int,
    temperature: float,
    decay: float,
    momentum: float,
    labels_first: bool,
) -> tuple[list[Tensor], nn.Sequential, nn.Sequential]:
    """Run AdaContrast; ``queue`` has the first features and labels. Returns predictions after each update."""
    student, averaged = copy.deepcopy(net).eval(), copy.deepcopy(net).eval()
    for network in (student, averaged):
        for number, layer in enumerate(network):
            if isinstance(layer, nn.BatchNorm2d):
                network[number] = NaiveTrainedNorm(layer, momentum)

    def track(is_tracking: bool) -> None:
        for network in (student, averaged):
            for layer in network:
                if isinstance(layer, NaiveTrainedNorm):
                    layer.is_tracking = is_tracking

    (body, head), (averaged_body, averaged_head) = split(student), split(averaged)
    trained = list(student.parameters())
    descent, predictions = optimizer(trained), []
    queue, bank, place, num_seen = list(queue), list[tuple[Tensor, Tensor]](), 0, 0
    for step, x in enumerate(batches):
        with torch.no_grad():
            for a, s in zip(averaged.parameters(), trained, strict=True):
                a.copy_(decay * a + (1 - decay) * s)
        track(True)
        with torch.no_grad():
            features = body(weak(step, x))
            votes = [torch.stack(probabilities(vector)) for vector in head(features)]
            if num_seen >= start_after:
                for i, feature in enumerate(features):
                    near = sorted(bank, key=lambda entry: -float(cosine(feature, entry[0])))[:num_neighbors]
                    votes[i] = torch.stack([vote for _, vote in near]).mean(0)
            labels = [int(vote.argmax()) for vote in votes]
        queries = body(query(step, x))
        with torch.no_grad():
            keys = [unit(each) for each in averaged_body(key(step, x))]
        before = list(queue)
        for each, label in zip(keys, labels, strict=True):
            queue[place] = (each, label)
            place = (place + 1) % len(queue)
        known = [label for _, label in (queue if labels_first else before)]
        losses, vectors = [], list(head(queries))
        for feature, vector, own, label in zip(queries, vectors, keys, labels, strict=True):
            positive = (unit(feature) * own).sum() / temperature
            others = [
                (unit(feature) * other).sum() / temperature
                for (other, _), other_label in zip(before, known, strict=True)
                if other_label != label
            ]
            losses.append(torch.stack([positive, *others]).logsumexp(0) - positive)
            losses[-1] = losses[-1] - probabilities(vector)[label].log()
        mean = torch.stack([torch.stack(probabilities(vector)) for vector in vectors]).mean(0)
        loss = add_up(losses) / len(losses) + add_up(m * m.log() for m in mean)
        descent.step(torch.autograd.grad(loss, trained))
        with torch.no_grad():
            features = averaged_body(weak(step, x))
            for feature, vector in zip(features, averaged_head(features), strict=True):
                bank.append((feature, torch.stack(probabilities(vector))))
            bank, num_seen = bank[-bank_size:], num_seen + len(x)
            track(False)
            predictions.append(student(x))
    return predictions, student, averaged
