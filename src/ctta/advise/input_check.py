"""Whether a network expects the images that it is given: the most frequent mistake is a wrong normalization.

The network is shown the same clean images under every common normalization. If it does clearly better under another
one than under the one that it is given, it was trained with that other one. With labels, better is a lower error, by
more than chance. Without labels, a network of which every layer gets what it was trained on is sure of its answers and
gives many different ones, which the mutual information of image and answer measures; and BatchNorm has recorded the
mean and variance that its layers got in training.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ctta.advise.images import LabeledImages, iter_batches
from ctta.functional import widest_float
from ctta.models import Normalized
from ctta.models.pretrained import IMAGENET_MEAN, IMAGENET_STD
from ctta.nn.surgery import copy_for_adaptation

Channels = tuple[float, float, float]


def _invert(mean: Channels, std: Channels) -> Channels:
    """Return the mean that, with 1 / std, undoes a normalization: (x + mean / std) * std = x * std + mean."""
    return -mean[0] / std[0], -mean[1] / std[1], -mean[2] / std[2]


#: Mean and standard deviation per channel that networks are trained with, by what people call them.
NORMALIZATIONS: dict[str, tuple[Channels, Channels]] = {
    "[0, 1]": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "ImageNet's mean and std": (IMAGENET_MEAN, IMAGENET_STD),
    "CIFAR-10's mean and std": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR-100's mean and std": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "[-1, 1]": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "[0, 255]": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
}
#: Normalizations that a network may apply once too often, each with what undoes it in front of the network.
UNDONE: dict[str, tuple[Channels, Channels]] = {
    f"{name} undone": (_invert(mean, std), (1 / std[0], 1 / std[1], 1 / std[2]))
    for name, (mean, std) in NORMALIZATIONS.items()
    if name in ("ImageNet's mean and std", "CIFAR-10's mean and std", "[-1, 1]")
}
MAX_IMAGES, BATCH_SIZE = 256, 64
#: With labels: standard errors, and points of error, by which another normalization has to be better.
MIN_DEVIATIONS, MIN_GAIN = 3.0, 0.03
#: Without labels: by which fraction of the largest possible value the mutual information has to be higher.
MIN_INFORMATION = 0.05
#: Without labels: by which factor the inputs of BatchNorms have to be closer to their running statistics.
MIN_CLOSER = 2.0


@dataclass(frozen=True)
class Normalization:
    """Images as the network gets them, and how well it does then."""

    name: str  # what people call it
    mean: Channels
    std: Channels
    error: float | None  # on clean images; None without labels
    information: float  # mutual information of image and answer, as a fraction of the largest possible value
    distance: float | None  # of the inputs of BatchNorms from their running statistics; None without BatchNorm

    @property
    def options(self) -> str:
        """The normalization as options of every command."""
        mean, std = (",".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"--mean {mean} --std {std}"


@dataclass(frozen=True)
class InputCheck:
    """How a network does on images as it is given them, and under the other common normalizations.

    Attributes:
        given: As it is given them.
        expected: The normalization under which it clearly does better; None if there is none.
        similar: Other normalizations under which it does about as well as under the expected one.
        is_wrapped: Whether the network is a :class:`ctta.models.Normalized`, whose normalization is then replaced; else
            what was tried is done to images in [0, 1] in front of the network.
    """

    given: Normalization
    expected: Normalization | None
    similar: tuple[str, ...]
    is_wrapped: bool

    def describe(self) -> str:
        """Return a sentence."""
        if self.expected is None:
            return f"Input: {self.given.name}, and no other common normalization suits the network better."
        found, given = self.expected, self.given
        if found.error is not None and given.error is not None:
            figures = f"an error of {100 * given.error:.1f} % on the clean images, and {100 * found.error:.1f} % with"
        else:
            figures = (
                f"answers with little information ({given.information:.2f} of 1), "
                f"and more ({found.information:.2f}) with"
            )
        if self.is_wrapped:
            advice = f"replace its normalization: ctta.models.Normalized(net, {found.mean}, {found.std})"
        elif found.name in UNDONE:
            advice = "it seems to normalize its input twice: remove one of the two"
        else:
            advice = f"give {found.options}, or return ctta.models.Normalized(net, {found.mean}, {found.std})"
        similar = f" ({' and '.join(self.similar)} do about as well: take that of its training)" if self.similar else ""
        return f"with {given.name} the network has {figures} {found.name}{similar}: {advice}"


@torch.no_grad()
def check_input(net: nn.Module, labeled: LabeledImages) -> InputCheck:
    """Find out whether a network expects the images that it is given.

    Args:
        net: The network, for images in [0, 1].
        labeled: Clean images.

    Returns:
        How the network does, and the normalization that it expects if that is another one.
    """
    some = labeled.select(slice(MAX_IMAGES))
    inner, given = _split(net)
    is_wrapped = isinstance(net, Normalized)
    tried = {name: values for name, values in NORMALIZATIONS.items() if values != given}
    if not is_wrapped:
        tried |= UNDONE
    named = next((name for name, values in NORMALIZATIONS.items() if values == given), "the given mean and std")
    answered = {"": _judge(inner, some, named, given)}
    answered |= {name: _judge(inner, some, name, values) for name, values in tried.items()}
    scores = {name: score for name, (score, _) in answered.items()}
    found = _find_better(scores, {name: wrong for name, (_, wrong) in answered.items() if wrong is not None})
    return InputCheck(
        scores[""],
        None if found is None else scores[found],
        () if found is None else _find_similar(scores, found),
        is_wrapped=is_wrapped,
    )


def _split(net: nn.Module) -> tuple[nn.Module, tuple[Channels, Channels]]:
    """Return the network without its normalization, and the normalization."""
    if not isinstance(net, Normalized):
        return net, NORMALIZATIONS["[0, 1]"]
    mean, std = (tuple(round(float(value), 6) for value in part.flatten()) for part in (net.mean, net.std))
    return net.net, (mean, std)  # type: ignore[return-value]  # three channels, or the network would refuse the images


def _judge(
    net: nn.Module, labeled: LabeledImages, name: str, values: tuple[Channels, Channels]
) -> tuple[Normalization, NDArray[np.bool_] | None]:
    """Return how well a network does under a normalization, and which images are wrong, if there are labels."""
    wrapped = copy_for_adaptation(Normalized(net, *values), batch_stats=0, output=None)
    layers = [module for module in wrapped.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    distances: list[float] = []
    handles = [layer.register_forward_pre_hook(_measure_distance(distances)) for layer in layers]
    logits = torch.cat([wrapped(x).float().cpu() for x in iter_batches(net, labeled.images, BATCH_SIZE)])
    for handle in handles:
        handle.remove()
    probabilities = logits.double().softmax(1).nan_to_num(0.0)
    entropies = torch.special.entr(probabilities).sum(1)
    marginal = torch.special.entr(probabilities.mean(0)).sum()
    information = float(marginal - entropies.mean()) / math.log(probabilities.shape[1])
    wrong = (logits.argmax(1).numpy() != labeled.targets) if labeled.has_labels else None
    error = None if wrong is None else float(wrong.mean())
    distance = float(np.mean(distances)) if distances else None
    return Normalization(name, *values, error, information, distance), wrong


def _measure_distance(distances: list[float]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def measure(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None
        x = inputs[0].to(widest_float(inputs[0].device))
        variance, mean = torch.var_mean(x, [axis for axis in range(x.ndim) if axis != 1])
        scale = module.running_var.to(x.dtype).clamp(min=1e-8)
        shift = (mean - module.running_mean).square() / scale
        ratio = (variance / scale).clamp(min=1e-8).log().abs()
        distances.append(float((shift + ratio).mean()))

    return measure


def _find_similar(scores: Mapping[str, Normalization], found: str) -> tuple[str, ...]:
    """Return the normalizations under which the network does about as well as under the one that was found."""
    best, others = scores[found], {name: score for name, score in scores.items() if name not in ("", found)}
    if best.error is not None:
        limit = best.error + MIN_GAIN
        return tuple(name for name, each in others.items() if each.error is not None and each.error < limit)
    limit = best.information - MIN_INFORMATION
    return tuple(name for name, each in others.items() if each.information > limit)


def _find_better(scores: Mapping[str, Normalization], wrong: Mapping[str, NDArray[np.bool_]]) -> str | None:
    """Return the normalization that clearly suits the network better than the given one, which is named ""."""
    given, others = scores[""], {name: score for name, score in scores.items() if name}
    if wrong:
        best = min(others, key=lambda name: float(wrong[name].mean()))
        gain = wrong[""].astype(int) - wrong[best].astype(int)
        is_clear = gain.sum() > MIN_DEVIATIONS * np.sqrt((gain != 0).sum()) and gain.mean() > MIN_GAIN
        return best if is_clear else None
    if given.distance is not None:
        best = min(others, key=lambda name: others[name].distance or 0.0)
        closer = given.distance / max(others[best].distance or 0.0, 1e-8)
        return best if closer > MIN_CLOSER and others[best].information > given.information else None
    best = max(others, key=lambda name: others[name].information)
    return best if others[best].information > given.information + MIN_INFORMATION else None
