"""The methods once more, straight from the paper with plain loops, to compare the library with.

Only the positions of restored weights and the drawn views are taken from the library, since random draws have to be
the same on both sides; how they are distributed is tested elsewhere.
"""

import copy
import hashlib
import math

import torch
from torch import nn

from ctta.functional import bernoulli_positions


class NaiveBatchNorm(nn.Module):
    """Normalises each channel by itself, by (1-share) * running + share * batch statistics."""

    def __init__(self, layer, share):
        super().__init__()
        self.weight, self.bias, self.eps, self.share = layer.weight, layer.bias, layer.eps, share
        self.running_mean, self.running_var = layer.running_mean, layer.running_var

    def forward(self, x):
        channels = []
        for c in range(x.shape[1]):
            values = x[:, c]
            count = values.numel()
            mean = values.sum() / count
            variance = ((values - mean) ** 2).sum() / count
            mean = (1 - self.share) * self.running_mean[c] + self.share * mean
            variance = (1 - self.share) * self.running_var[c] + self.share * variance
            normal = (values - mean) / (variance + self.eps) ** 0.5
            channels.append(normal * self.weight[c] + self.bias[c])
        return torch.stack(channels, 1)


def naive_copy(net, share):
    """A copy of a Sequential whose BatchNorms are naive ones."""
    net = copy.deepcopy(net).eval()
    for number, layer in enumerate(net):
        if isinstance(layer, nn.BatchNorm2d):
            net[number] = NaiveBatchNorm(layer, share)
    return net


class NaiveAdam:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps = list(parameters), lr, betas, eps
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0

    def step(self, gradients):
        self.steps += 1
        one, two = self.betas
        for i, gradient in enumerate(gradients):
            self.first[i] = one * self.first[i] + (1 - one) * gradient
            self.second[i] = two * self.second[i] + (1 - two) * gradient**2
            mean = self.first[i] / (1 - one**self.steps)
            variance = self.second[i] / (1 - two**self.steps)
            with torch.no_grad():
                self.parameters[i] -= self.lr * mean / (variance.sqrt() + self.eps)


class NaiveNesterov:
    def __init__(self, parameters, lr, momentum):
        self.parameters, self.lr, self.momentum, self.speed = list(parameters), lr, momentum, None

    def step(self, gradients):
        if self.speed is None:
            self.speed = [g.clone() for g in gradients]
        else:
            self.speed = [self.momentum * s + g for s, g in zip(self.speed, gradients, strict=True)]
        for p, g, s in zip(self.parameters, gradients, self.speed, strict=True):
            with torch.no_grad():
                p -= self.lr * (g + self.momentum * s)


def elements(logits):
    """Every element's vector of logits: images one by one, or pixels one by one."""
    if logits.ndim == 2:
        return [logits[i] for i in range(len(logits))]
    n, _, height, width = logits.shape
    return [logits[i, :, r, c] for i in range(n) for r in range(height) for c in range(width)]


def back_from_elements(vectors, like):
    if like.ndim == 2:
        return torch.stack(vectors)
    n, classes, height, width = like.shape
    return torch.stack(vectors).reshape(n, height, width, classes).permute(0, 3, 1, 2)


def probabilities(vector):
    exponentials = [(v - vector.max()).exp() for v in vector]
    return [e / sum(exponentials) for e in exponentials]


def cross(target, answer):
    """-sum_c target_c log answer_c over lists of probabilities."""
    return -sum(t * a.log() for t, a in zip(target, answer, strict=True))


def naive_self_training(net, batches, *, parameters, loss, optimizer, share=1.0):
    """TENT (loss 'entropy') and Pseudo-label (loss 'argmax')."""
    student = naive_copy(net, share)
    trained = parameters(student)
    descent = optimizer(trained)
    answers = []
    for x in batches:
        logits = student(x)
        total = 0
        for vector in elements(logits):
            p = probabilities(vector)
            total = total + (cross(p, p) if loss == "entropy" else -p[int(vector.argmax())].log())
        descent.step(torch.autograd.grad(total / len(elements(logits)), trained))
        answers.append(logits.detach())
    return answers, student


def mean_over_views(views, model, x, average):
    answers = [view(model, x) for view in views]
    if average == "logits":
        return sum(answers) / len(answers)
    vectors = []
    for several in zip(*[elements(answer) for answer in answers], strict=True):
        lists = [probabilities(vector) for vector in several]
        vectors.append(torch.stack([sum(column) / len(lists) for column in zip(*lists, strict=True)]).log())
    return back_from_elements(vectors, answers[0])


def naive_test_aug(net, batches, *, draw, average, share=1.0):
    source = naive_copy(net, share)
    with torch.no_grad():
        return [mean_over_views(draw(step), source, x, average) for step, x in enumerate(batches)]


def step_generator(seed, step, purpose):
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def naive_cotta(
    net, batches, *, draw, gate, average, predict_with, loss, threshold, decay, restore, optimizer, share=1.0, seed=0
):
    source, teacher, student = (naive_copy(net, share) for _ in range(3))
    trained = list(student.parameters())
    descent = optimizer(trained)
    answers = []
    for step, x in enumerate(batches):
        with torch.no_grad():
            direct = teacher(x)
            certainty = [max(probabilities(vector)) for vector in elements(source(x))]
            if gate == "batch":
                certainty = [sum(certainty) / len(certainty)] * len(certainty)
            views = draw(step)
            refined = mean_over_views(views, teacher, x, average) if views else direct
            chosen = [
                there if c < threshold and views else here
                for c, here, there in zip(certainty, elements(direct), elements(refined), strict=True)
            ]
            target = back_from_elements(chosen, direct)
        total = 0
        for vector, goal in zip(elements(student(x)), elements(target), strict=True):
            answer, wanted = probabilities(vector), probabilities(goal)
            if loss == "cross_entropy":
                total = total + cross(wanted, answer)
            elif loss == "symmetric":
                total = total + cross(wanted, answer) / 2 + cross(answer, wanted) / 2
            else:
                total = total - answer[int(goal.argmax())].log()
        descent.step(torch.autograd.grad(total / len(elements(target)), trained))
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(decay * t + (1 - decay) * s)
            count = sum(p.numel() for p in trained)
            restored = set(bernoulli_positions(count, restore, step_generator(seed, step, "restore")).tolist())
            place = 0
            for s, original in zip(student.parameters(), source.parameters(), strict=True):
                for i in range(s.numel()):
                    if place in restored:
                        index = tuple(int(k) for k in torch.unravel_index(torch.tensor(i), s.shape))
                        s[index] = original[index]
                    place += 1
        answers.append(target if predict_with == "refined" else direct)
    return answers, student, teacher


def naive_view(view, image):
    """One view of one image (3, n, n) by the recipe, pixel by pixel; the test adds the noise."""
    n = image.shape[-1]
    image = image.clamp(0, 1)

    def grey_at(r, c):
        return 0.2989 * image[0, r, c] + 0.587 * image[1, r, c] + 0.114 * image[2, r, c]

    for operation in view.color_order:
        if operation == 0:
            image = image * view.brightness
        elif operation == 1:
            mean = sum(grey_at(r, c) for r in range(n) for c in range(n)) / n**2
            image = view.contrast * image + (1 - view.contrast) * mean
        elif operation == 2:
            grey = torch.stack([torch.stack([grey_at(r, c) for c in range(n)]) for r in range(n)])
            image = view.saturation * image + (1 - view.saturation) * grey
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
            for row, row_share in ((top, 1 - (from_r - top)), (top + 1, from_r - top)):
                for column, column_share in ((left, 1 - (from_c - left)), (left + 1, from_c - left)):
                    if 0 <= row < size and 0 <= column < size:
                        moved[:, r, c] += row_share * column_share * padded[:, row, column]
    taps = [math.exp(-0.5 * (k / view.sigma) ** 2) for k in (-2, -1, 0, 1, 2)]
    taps = [tap / sum(taps) for tap in taps]
    cropped = torch.zeros_like(image)
    for r in range(n):
        for c in range(n):
            for i, vertical in enumerate(taps):
                for j, horizontal in enumerate(taps):
                    cropped[:, r, c] += vertical * horizontal * moved[:, r + pad + i - 2, c + pad + j - 2]
    return cropped.flip(-1) if view.flip else cropped


def naive_hue(image, turns):
    import colorsys

    result = torch.zeros_like(image)
    for r in range(image.shape[1]):
        for c in range(image.shape[2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[:, r, c].tolist())
            turned = colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value)
            result[:, r, c] = torch.tensor(turned, dtype=image.dtype)
    return result
