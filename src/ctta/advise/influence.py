"""How many of the other answers of a batch one foreign image changes, through the statistics that they share.

BatchNorm with statistics of the batch makes every answer depend on every image of the batch. One image is replaced,
and the other answers are compared with what they were before. A hostile image is found by following the gradient of
the other answers' loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import fmean, stdev

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ctta.advise.images import LabeledImages, iter_batches
from ctta.nn import BatchStats, has_running_statistics
from ctta.nn.surgery import copy_for_adaptation

BATCH, WINDOW, MEDIAN = "batch statistics", "batch statistics over four batches", "the median over images"
#: What BatchNorm may normalize by, and what each is called on the page.
MODES: dict[str, BatchStats] = {
    BATCH: 1.0,
    "blended by the size of the batch": "blend",
    "a tenth of the batch": 0.1,
    "the source's statistics": 0.0,
    WINDOW: 1.0,
    MEDIAN: 0.0,  # a hook normalizes first
}
WINDOW_BATCHES = 3  # before the one that the image is in
KINDS = ("noise", "white", "hostile")
NUM_BATCHES, NUM_STEPS, STEP_SIZE = 6, 20, 0.1

#: A network whose answers depend on each other.
SharedNetwork = Callable[[Tensor], Tensor]
#: Returns what was measured under a name before, or measures it; given the cost too.
RunCell = Callable[[str, int, Callable[[], float]], float]


@dataclass(frozen=True)
class Influence:
    """What one image does to the other answers of its batch.

    Attributes:
        mode: What BatchNorm normalizes by.
        image: What the image is: "noise", "white" or "hostile".
        flipped: Mean fraction of the other answers that change.
        half_width: Half of the 95 % interval of the mean, by the spread between batches.
        worst: The largest fraction in a batch.
        batch_size: Images in a batch.
    """

    mode: str
    image: str
    flipped: float
    half_width: float
    worst: float
    batch_size: int


def measure_influence(
    net: nn.Module,
    labeled: LabeledImages,
    *,
    batch_size: int,
    seed: int = 0,
    run_cell: RunCell = lambda _name, _num_images, measure: measure(),
) -> list[Influence]:
    """Measure how many of the other answers of a batch one foreign or hostile image changes.

    Args:
        net: The network, for images in [0, 1].
        labeled: Clean images.
        batch_size: Images in a batch.
        seed: Seed of the noise.
        run_cell: Called with the name of each cell, a batch with one other image in it, its cost, see
            :func:`count_images`, and what measures it. It returns what was measured, now or before.

    Returns:
        A row for each mode and kind of image; empty for a network without BatchNorm, whose answers are independent,
        or for batches of one.
    """
    batch_size = min(batch_size, len(labeled.images))
    batches = [x for x in iter_batches(net, labeled.images, batch_size) if len(x) == batch_size][:NUM_BATCHES]
    modes = _list_modes(net, len(batches), batch_size)
    by_batch = copy_for_adaptation(net, batch_stats=1.0, output=None).requires_grad_(False)
    rows = []
    for mode in modes:
        shared = copy_for_adaptation(net, batch_stats=MODES[mode], output=None).requires_grad_(False)
        if mode == MEDIAN:
            use_median_(shared)
        for kind in KINDS:
            changes = []
            for number, x in enumerate(batches):
                model: SharedNetwork = shared
                if mode == WINDOW:
                    window = [batches[(number - i) % len(batches)] for i in range(WINDOW_BATCHES, 0, -1)]
                    model = _with_window(shared, torch.cat(window))
                # Two attacks on medians, as either may be the stronger one: with their approximate gradients, and one
                # made against batch statistics.
                attacked = (model, by_batch) if mode == MEDIAN and kind == "hostile" else (model,)
                measure = partial(_count_most_flips, model, attacked, x, kind, seed + number)
                changes.append(run_cell(f"{mode} {kind} {number}", _count_passes(mode, kind) * batch_size, measure))
            rows.append(_summarize(mode, kind, changes, batch_size))
    return rows


def count_images(net: nn.Module, num_images: int, batch_size: int) -> int:
    """Return the cost of :func:`measure_influence`: images that the network predicts, a backward pass as two."""
    number, size = min(NUM_BATCHES, max(1, num_images // batch_size)), min(batch_size, num_images)
    modes = _list_modes(net, number, size)
    return sum(number * size * _count_passes(mode, kind) for mode in modes for kind in KINDS)


def _count_passes(mode: str, kind: str) -> int:
    """Return the passes over a batch that a cell takes."""
    passes = 2 + (3 * NUM_STEPS if kind == "hostile" else 0)
    return passes * (1 + WINDOW_BATCHES if mode == WINDOW else 2 if mode == MEDIAN and kind == "hostile" else 1)


def _list_modes(net: nn.Module, num_batches: int, batch_size: int) -> list[str]:
    """Return the modes to measure; none where answers are independent."""
    if batch_size < 2 or not any(isinstance(module, _BatchNorm) for module in net.modules()):
        return []
    modes = list(MODES) if has_running_statistics(net) else [BATCH, WINDOW]
    return [mode for mode in modes if mode != WINDOW or num_batches > WINDOW_BATCHES]


def use_median_(net: nn.Module) -> None:
    """Let every BatchNorm normalize by medians over the images, of which one image moves little."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(_normalize_by_median)


def _normalize_by_median(module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = inputs[0]
    assert module.running_mean is not None and module.running_var is not None
    shape, space = (1, -1) + (1,) * (x.ndim - 2), tuple(range(2, x.ndim))
    center = _over_images(x, space).view(shape)
    variance = _over_images((x - center).square(), space).view(shape)
    scale = ((module.running_var.view(shape) + module.eps) / (variance + module.eps)).sqrt()
    return ((x - center) * scale + module.running_mean.view(shape), *inputs[1:])


def _over_images(values: Tensor, space: tuple[int, ...]) -> Tensor:
    """Return the median over images of the mean of every channel (C).

    Its gradient is that of the mean over images: a median passes one to an image or two only, which would hide from an
    attack what the others do (backward pass differentiable approximation, Athalye et al. 2018).
    """
    by_image = values.mean(space) if space else values
    mean = by_image.mean(0)
    return by_image.detach().quantile(0.5, dim=0) + (mean - mean.detach())


def _with_window(net: SharedNetwork, window: Tensor) -> SharedNetwork:
    """Return a network that sees a batch together with what came before it."""
    return lambda x: net(torch.cat([window, x]))[len(window) :]


def _count_most_flips(net: SharedNetwork, attacked: Sequence[SharedNetwork], x: Tensor, kind: str, seed: int) -> float:
    return max(_count_flips(net, each, x, kind, seed) for each in attacked)


def _count_flips(net: SharedNetwork, attacked: SharedNetwork, x: Tensor, kind: str, seed: int) -> float:
    """Return the fraction of the other answers that change if the first image is replaced."""
    with torch.no_grad():
        before = net(x).argmax(1)[1:]
    image = _make_image(attacked, x, before, kind, seed)
    with torch.no_grad():
        after = net(torch.cat([image, x[1:]])).argmax(1)[1:]
    return float((before != after).cpu().double().mean())


def _make_image(net: SharedNetwork, x: Tensor, answers: Tensor, kind: str, seed: int) -> Tensor:
    if kind == "white":
        return torch.ones_like(x[:1])
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(x[:1].shape, generator=generator).to(x)
    if kind == "noise":
        return image
    for _ in range(NUM_STEPS):
        image.requires_grad_(True)
        loss = F.cross_entropy(net(torch.cat([image, x[1:]]))[1:], answers)
        (gradient,) = torch.autograd.grad(loss, image)
        image = (image + STEP_SIZE * gradient.sign()).clamp(0, 1).detach()
    return image


def _summarize(mode: str, image: str, changes: Sequence[float], batch_size: int) -> Influence:
    half = 1.96 * stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else float("nan")
    return Influence(mode, image, fmean(changes), half, max(changes), batch_size)
