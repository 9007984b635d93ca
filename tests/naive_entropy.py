"""Independent implementations of the entropy family with plain loops, to compare the library with.

They follow the published formulas and know nothing of the library. What is random (views, shuffled patches) is passed
in as a function of the step, since both sides need the same draws.
"""

import math
from collections.abc import Callable, Sequence

import torch
from naive import MakeOptimizer, NaiveBatchNorm, add_up, cross, elements, naive_copy, probabilities
from torch import Tensor, nn

Run = tuple[list[Tensor], nn.Sequential]
#: Changes a batch of images; the number is that of the step.
Augment = Callable[[int, Tensor], Tensor]


class NaiveSGD:
    """SGD with momentum, without Nesterov's correction."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        self.velocity: list[Tensor] | None = None

    def step(self, gradients: Sequence[Tensor]) -> None:
        if self.velocity is None:
            self.velocity = [gradient.clone() for gradient in gradients]
        else:
            self.velocity = [self.momentum * v + g for v, g in zip(self.velocity, gradients, strict=True)]
        for parameter, velocity in zip(self.parameters, self.velocity, strict=True):
            with torch.no_grad():
                parameter.sub_(self.lr * velocity)


def norm_parameters(net: nn.Sequential) -> list[nn.Parameter]:
    return [p for layer in net if isinstance(layer, NaiveBatchNorm) for p in (layer.weight, layer.bias)]


def shannon(vector: Tensor) -> Tensor:
    p = probabilities(vector)
    return -add_up(each * each.log() for each in p)


def come(vector: Tensor) -> Tensor:
    """Return COME's entropy of belief masses and uncertainty, with K = number of classes."""
    length = vector.square().sum().sqrt()
    scaled = vector / length * length.detach()
    num_classes = len(vector)
    total = add_up(scaled.exp()) + num_classes
    masses = [each.exp() / total for each in scaled] + [num_classes / total]
    return -add_up(mass * (mass + 1e-7).log() for mass in masses)


def cosine(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum() / (one.square().sum().sqrt() * other.square().sum().sqrt())


def mean_probabilities(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.stack(probabilities(vector)) for vector in vectors]).mean(0)


def naive_eata(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    margin: float,
    redundancy: float,
    fisher: Sequence[Tensor] | None = None,
    fisher_weight: float = 0.0,
    entropy: Callable[[Tensor], Tensor] = shannon,
    reset_every: int = 0,
    fraction: float = 1.0,
) -> Run:
    """Run ETA, with ``fisher`` EATA, with ``reset_every`` RDumb. ``margin`` is a fraction of ln C."""
    student, average = naive_copy(net, fraction), None
    trained = norm_parameters(student)
    source = [p.detach().clone() for p in trained]
    descent, predictions = optimizer(trained), []
    for step, x in enumerate(batches):
        if reset_every and step % reset_every == 0:
            with torch.no_grad():
                for p, original in zip(trained, source, strict=True):
                    p.copy_(original)
            descent, average = optimizer(trained), None
        logits = student(x)
        limit = margin * math.log(logits.shape[1])
        vectors = elements(logits)
        entropies = [entropy(vector) for vector in vectors]
        chosen = [i for i, value in enumerate(entropies) if value < limit]
        if average is not None:
            chosen = [i for i in chosen if abs(cosine(average, torch.stack(probabilities(vectors[i])))) < redundancy]
        if chosen:
            loss = add_up((limit - entropies[i].detach()).exp() * entropies[i] for i in chosen) / len(chosen)
            if fisher is not None:
                for p, original, importance in zip(trained, source, fisher, strict=True):
                    loss = loss + fisher_weight * (importance * (p - original) ** 2).sum()
            descent.step(torch.autograd.grad(loss, trained))
            latest = mean_probabilities([vectors[i].detach() for i in chosen])
            average = latest if average is None else 0.9 * average + 0.1 * latest
        predictions.append(logits.detach())
    return predictions, student


def naive_fisher(net: nn.Sequential, batches: list[Tensor], fraction: float = 1.0) -> list[Tensor]:
    """Return the mean over batches of the squared gradient of the batch-mean loss against the network's argmax."""
    student = naive_copy(net, fraction)
    trained = norm_parameters(student)
    total = [torch.zeros_like(p) for p in trained]
    for x in batches:
        losses = [-probabilities(vector)[int(vector.argmax())].log() for vector in elements(student(x))]
        gradients = torch.autograd.grad(add_up(losses) / len(losses), trained)
        total = [one + gradient**2 for one, gradient in zip(total, gradients, strict=True)]
    return [one / len(batches) for one in total]


def naive_rpl(
    net: nn.Sequential, batches: list[Tensor], *, optimizer: MakeOptimizer, q: float, fraction: float = 1.0
) -> Run:
    student = naive_copy(net, fraction)
    trained = norm_parameters(student)
    descent, predictions = optimizer(trained), []
    for x in batches:
        logits = student(x)
        losses = [(1 - max(probabilities(vector)) ** q) / q for vector in elements(logits)]
        descent.step(torch.autograd.grad(add_up(losses) / len(losses), trained))
        predictions.append(logits.detach())
    return predictions, student


def likelihood_ratio(vector: Tensor, clip: float | None = 0.99) -> Tensor:
    if clip is None:
        plain = probabilities(vector)
        others = [add_up(q for j, q in enumerate(plain) if j != i) for i in range(len(plain))]
        return -add_up(p * (p / rest).log() for p, rest in zip(plain, others, strict=True))
    clipped = [p.clamp(max=clip) for p in probabilities(vector)]
    return -add_up(q * (q / (1 - q) + 1e-5).log() for q in clipped)


def naive_slr(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    weight: float,
    momentum: float,
    clip: float | None = 0.99,
    fraction: float = 1.0,
) -> Run:
    """Maximize the entropy of a running marginal, which starts uniform, plus the soft likelihood ratio."""
    student, marginal = naive_copy(net, fraction), None
    trained = norm_parameters(student)
    descent, predictions = optimizer(trained), []
    for x in batches:
        logits = student(x)
        vectors = elements(logits)
        if marginal is None:
            marginal = torch.full_like(vectors[0], 1 / len(vectors[0])).detach()
        latest = momentum * marginal + (1 - momentum) * mean_probabilities(vectors)
        diversity = add_up(m * m.log() for m in latest)
        ratio = add_up(likelihood_ratio(vector, clip) for vector in vectors) / len(vectors)
        descent.step(torch.autograd.grad(diversity + weight * ratio, trained))
        marginal = latest.detach()
        predictions.append(logits.detach())
    return predictions, student


def naive_sar(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    parameters: Callable[[nn.Sequential], list[nn.Parameter]],
    optimizer: MakeOptimizer,
    margin: float,
    radius: float,
    recover_below: float,
    entropy: Callable[[Tensor], Tensor] = shannon,
    fraction: float = 1.0,
) -> tuple[list[Tensor], nn.Sequential, int]:
    """Run SAR; also returns the number of recoveries. ``recover_below`` is in nats. Empty selections take no step."""
    student, average, num_recoveries = naive_copy(net, fraction), None, 0
    trained = parameters(student)
    source = [p.detach().clone() for p in trained]
    descent, predictions = optimizer(trained), []

    def reliable(logits: Tensor, candidates: Sequence[int]) -> dict[int, Tensor]:
        vectors = elements(logits)
        values = {i: entropy(vectors[i]) for i in candidates}
        return {i: value for i, value in values.items() if value < margin * math.log(logits.shape[1])}

    for x in batches:
        logits = student(x)
        predictions.append(logits.detach())
        first = reliable(logits, range(len(elements(logits))))
        if not first:
            continue
        gradients = torch.autograd.grad(add_up(first.values()) / len(first), trained)
        length = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        before = [p.detach().clone() for p in trained]
        with torch.no_grad():
            for p, g in zip(trained, gradients, strict=True):
                p.add_(radius * g / (length + 1e-12))
        second = reliable(student(x), list(first))
        loss = add_up(second.values()) / len(second) if second else None
        climbed = torch.autograd.grad(loss, trained) if loss is not None else None
        with torch.no_grad():
            for p, b in zip(trained, before, strict=True):
                p.copy_(b)
        if loss is None or climbed is None:
            continue
        descent.step(climbed)
        average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        if average < recover_below:
            num_recoveries += 1
            average, descent = None, optimizer(trained)
            with torch.no_grad():
                for p, original in zip(trained, source, strict=True):
                    p.copy_(original)
    return predictions, student, num_recoveries


def naive_deyo(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    parameters: Callable[[nn.Sequential], list[nn.Parameter]],
    optimizer: MakeOptimizer,
    shuffle: Augment,
    select_below: float,
    weight_below: float,
    min_difference: float,
    fraction: float = 1.0,
) -> Run:
    """Run DeYO; both margins are fractions of ln C. Only the images that pass the first filter are shuffled."""
    student = naive_copy(net, fraction)
    trained = parameters(student)
    descent, predictions = optimizer(trained), []
    for step, x in enumerate(batches):
        logits = student(x)
        predictions.append(logits.detach())
        vectors, scale = elements(logits), math.log(logits.shape[1])
        entropies = [shannon(vector) for vector in vectors]
        first = [i for i, value in enumerate(entropies) if value < select_below * scale]
        if not first:
            continue
        with torch.no_grad():
            shuffled = elements(student(shuffle(step, x)[first]))
        terms = []
        for i, other in zip(first, shuffled, strict=True):
            label = int(vectors[i].argmax())
            difference = probabilities(vectors[i])[label].item() - probabilities(other)[label].item()
            if difference > min_difference:
                weight = math.exp(weight_below * scale - entropies[i].item()) + math.exp(difference)
                terms.append(weight * entropies[i])
        if terms:
            descent.step(torch.autograd.grad(add_up(terms) / len(terms), trained))
    return predictions, student


def scale_to_unit(values: Sequence[float]) -> list[float]:
    """Scale to [0, 1]; values that are all equal become 0, so that every image weighs the same."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def naive_roid(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    augment: Augment,
    temperature: float = 1 / 3,
    source_fraction: float = 0.01,
    kalman: "NaiveKalman | None" = None,
    correct_prior: str | None = "official",
    fraction: float = 1.0,
) -> Run:
    """Run ROID, or CMF if ``kalman`` is given. The loss is divided by the size of the batch."""
    student, average = naive_copy(net, fraction), None
    trained = norm_parameters(student)
    source = [p.detach().clone() for p in trained]
    descent, predictions = optimizer(trained), []
    for step, x in enumerate(batches):
        logits = student(x)
        vectors = elements(logits)
        plain = [torch.stack(probabilities(vector.detach())) for vector in vectors]
        if average is None:
            average = torch.full_like(plain[0], 1 / len(plain[0]))
        diversity = scale_to_unit([float(1 - cosine(average, p)) for p in plain])
        certainty = scale_to_unit([float(-shannon(vector.detach())) for vector in vectors])
        mean = sum(diversity) / len(diversity)
        weights = [
            math.exp(d * c / temperature) if d >= mean else 0.0 for d, c in zip(diversity, certainty, strict=True)
        ]
        kept = [i for i, d in enumerate(diversity) if d >= mean]
        average = 0.9 * average + 0.1 * torch.stack(plain).mean(0)
        views = elements(student(augment(step, x)[kept]))
        terms = []
        for i, view in zip(kept, views, strict=True):
            clean, changed = probabilities(vectors[i]), probabilities(view)
            consistency = cross(clean, changed) / 2 + cross(changed, clean) / 2
            terms.append(weights[i] * (likelihood_ratio(vectors[i]) + consistency))
        descent.step(torch.autograd.grad(add_up(terms) / len(vectors), trained))
        with torch.no_grad():
            if kalman is not None:
                kalman.step(trained, source)
            else:
                for p, original in zip(trained, source, strict=True):
                    p.copy_((1 - source_fraction) * p + source_fraction * original)
        predictions.append(correct(logits.detach(), correct_prior))
    return predictions, student


def correct(logits: Tensor, how: str | None) -> Tensor:
    """Correct logits by the smoothed mean prediction of the batch."""
    if how is None:
        return logits
    num_images, num_classes = logits.shape
    prior = mean_probabilities(elements(logits))
    smoothing = max(1 / num_images, 1 / num_classes) / float(prior.max())
    smoothed = (prior + smoothing) / (1 + smoothing * num_classes)
    return logits * smoothed if how == "official" else logits.log_softmax(1) + smoothed.log()


class NaiveKalman:
    """CMF's filter of the weights."""

    def __init__(
        self, num_trained: int, alpha: float = 0.99, gamma: float = 0.99, q: float = 0.005, pull_to: str = "filtered"
    ) -> None:
        self.alpha, self.gamma, self.q, self.pull_to = alpha, gamma, q * num_trained / 38_400, pull_to
        self.variance, self.hidden = 0.0, list[Tensor]()

    def step(self, trained: Sequence[nn.Parameter], source: Sequence[Tensor]) -> None:
        hidden = self.hidden or [original.clone() for original in source]
        r = 1 - self.q
        self.variance = self.alpha**2 * self.variance + self.q
        beta = max(r / (self.variance + r), 0.89)
        beta = 1.0 if beta >= 0.9999 else beta
        self.variance = beta * self.variance
        self.hidden = []
        for h, p, original in zip(hidden, trained, source, strict=True):
            predicted = self.alpha * h + (1 - self.alpha) * original
            filtered = beta * predicted + (1 - beta) * p
            p.copy_(self.gamma * p + (1 - self.gamma) * (filtered if self.pull_to == "filtered" else predicted))
            self.hidden.append(filtered.detach().clone())


def naive_delta(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    norm_momentum: float = 0.95,
    class_momentum: float = 0.95,
    kind: str = "entropy",
) -> Run:
    """Run DELTA around TENT, the entropy of the surer half, or pseudo-labels."""
    student = naive_copy(net, 1.0)
    for number, layer in enumerate(student):
        if isinstance(layer, NaiveBatchNorm):
            student[number] = NaiveRenorm(layer, norm_momentum)
    trained = [p for layer in student if isinstance(layer, NaiveRenorm) for p in (layer.weight, layer.bias)]
    descent, predictions, frequency = optimizer(trained), list[Tensor](), None
    for x in batches:
        logits = student(x)
        vectors = elements(logits)
        if frequency is None:
            frequency = torch.full_like(vectors[0].detach(), 1 / len(vectors[0]))
        inverse = [1 / float(q) for q in frequency]
        inverse = [one / sum(inverse) for one in inverse]
        weights = [inverse[int(vector.argmax())] for vector in vectors]
        weights = [weight * len(weights) / sum(weights) for weight in weights]
        terms = []
        for weight, vector in zip(weights, vectors, strict=True):
            value, surest = shannon(vector), max(probabilities(vector))
            reliability = math.exp(0.5 * math.log(len(vector)) - value.item())
            if kind == "entropy":
                terms.append(weight * value)
            elif kind == "weighted_entropy" and reliability > 1:
                terms.append(weight * reliability * value)
            elif kind == "pseudo_label" and surest > 0.4:
                terms.append(-weight * surest.log())
        if terms:
            descent.step(torch.autograd.grad(add_up(terms) / len(terms), trained))
        latest = mean_probabilities([vector.detach() for vector in vectors])
        frequency = class_momentum * frequency + (1 - class_momentum) * latest
        predictions.append(logits.detach())
    return predictions, student


class NaiveRenorm(nn.Module):
    """DELTA's batch renormalization, with moving averages of mean and standard deviation."""

    def __init__(self, layer: NaiveBatchNorm, momentum: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = layer.weight, layer.bias, layer.eps, momentum
        self.mean: list[Tensor] = []
        self.std: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        is_first, channels = not self.mean, []
        for c in range(x.shape[1]):
            values = x[:, c]
            mean = values.mean()
            std = (((values - mean) ** 2).mean() + self.eps).sqrt()
            if is_first:
                self.mean.append(mean.detach())
                self.std.append(std.detach())
            r, d = std.detach() / self.std[c], (mean.detach() - self.mean[c]) / self.std[c]
            channels.append(((values - mean) / std * r + d) * self.weight[c] + self.bias[c])
            self.mean[c] = self.momentum * self.mean[c] + (1 - self.momentum) * mean.detach()
            self.std[c] = self.momentum * self.std[c] + (1 - self.momentum) * std.detach()
        return torch.stack(channels, 1)


def naive_shot_im(
    net: nn.Sequential,
    batches: list[Tensor],
    *,
    optimizer: MakeOptimizer,
    pseudo_label_weight: float = 0.0,
    min_confidence: float = 0.9,
    fraction: float = 1.0,
) -> Run:
    """Train everything but the last layer by information maximization."""
    student = naive_copy(net, fraction)
    trained = [p for layer in list(student)[:-1] for p in layer.parameters()]
    descent, predictions = optimizer(trained), []
    for x in batches:
        logits = student(x)
        vectors = elements(logits)
        loss = add_up(shannon(vector) for vector in vectors) / len(vectors)
        loss = loss + add_up(m * (m + 1e-5).log() for m in mean_probabilities(vectors))
        sure = [vector for vector in vectors if max(probabilities(vector)) > min_confidence]
        if sure and pseudo_label_weight:
            labels = [-probabilities(vector)[int(vector.argmax())].log() for vector in sure]
            loss = loss + pseudo_label_weight * add_up(labels) / len(labels)
        descent.step(torch.autograd.grad(loss, trained))
        predictions.append(logits.detach())
    return predictions, student


def naive_zerosiam(net: nn.Sequential, batches: list[Tensor], *, lr: float, map_rate: float) -> tuple[Run, Tensor]:
    """Return the run of ZeroSiam, and its map."""
    student, head = naive_copy(net, 1.0), net[-1]
    assert isinstance(head, nn.Linear)
    mapping = nn.Parameter(torch.eye(head.in_features, dtype=head.weight.dtype))
    trained, predictions = norm_parameters(student), list[Tensor]()
    descents = [NaiveSGD(trained, lr), NaiveSGD([mapping], map_rate * lr)]
    for x in batches:
        total, answers = torch.zeros((), dtype=x.dtype), []
        for z in student[:-1](x):
            answers.append((head.weight @ z + head.bias).detach())
            q, p = probabilities(head.weight @ (mapping @ z) + head.bias), probabilities(answers[-1])
            total = total + add_up(
                -a * a.log() + b * (b / a).log() + a * (a / b).log() for a, b in zip(q, p, strict=True)
            )
        gradients = torch.autograd.grad(total / len(x), [*trained, mapping])
        descents[0].step(gradients[:-1])
        descents[1].step(gradients[-1:])
        predictions.append(torch.stack(answers))
    return (predictions, student), mapping.detach()
