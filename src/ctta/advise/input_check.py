"""Whether a network expects the images that it is given: frequent mistakes are a wrong normalization and a wrong size.

The network is shown the same clean images under every common normalization, and in the sizes that networks are trained
on. If it does clearly better under another one than under the one that it is given, it was trained with that other
one. With labels, better is a lower error, by more than chance. Without labels, a network of which every layer gets what
it was trained on is sure of its answers and gives many different ones, which the mutual information of image and answer
measures; and BatchNorm has recorded the mean and variance that its layers got in training.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ctta.advise.images import ImageOptions, ImageSource, LabeledImages, gather_images, iter_batches, label_images
from ctta.errors import ConfigError, InputError
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
#: Heights and widths that networks are trained on.
SIZES = (32, 64, 96, 128, 224)
#: By which factor another size has to differ to be tried: networks work in sizes near that of their training.
MIN_SCALE = 1.4
MAX_IMAGES, BATCH_SIZE = 512, 64
#: Standard errors by which another input has to be better, image by image.
MIN_DEVIATIONS = 3.0
#: With labels: points of error by which it has to be better.
MIN_GAIN = 0.03
#: Without labels: fraction of the largest possible mutual information by which it has to be higher, for another
#: normalization and for another size. Answers depend on the size in more ways than on whether it is that of training.
MIN_INFORMATION, MIN_SIZE_INFORMATION = 0.01, 0.1
#: Without labels: by which factor the inputs of BatchNorms have to be closer to their running statistics.
MIN_CLOSER = 2.0
#: Images under which nothing is judged.
FEWEST_IMAGES = 16


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
class SizeCheck:
    """A size of images in which a network clearly does better than in the given one."""

    given: tuple[int, int]  # (height, width)
    expected: tuple[int, int]
    information: float  # mutual information of image and answer in the given size
    expected_information: float

    def describe(self) -> str:
        """Return a sentence, without a period."""
        (height, width), (better, _) = self.given, self.expected
        return (
            f"the network gets images of {height}x{width} and its answers say more about them at {better}x{better} "
            f"({self.expected_information:.2f} of 1 instead of {self.information:.2f}): if it was trained on images of "
            f"that size, give --size {better} {better} (size=)"
        )


@dataclass(frozen=True)
class InputCheck:
    """How a network does on images as it is given them, under the other common normalizations, and in other sizes.

    Attributes:
        given: As it is given them.
        expected: The normalization under which it clearly does better; None if there is none.
        similar: Other normalizations under which it does about as well as under the expected one.
        is_wrapped: Whether the network is a :class:`ctta.models.Normalized`, whose normalization is then replaced; else
            what was tried is done to images in [0, 1] in front of the network.
        size: The size in which it clearly does better; None if there is none. Normalizations were tried in that size.
    """

    given: Normalization
    expected: Normalization | None
    similar: tuple[str, ...]
    is_wrapped: bool
    size: SizeCheck | None = None

    @property
    def is_expected(self) -> bool:
        """Whether the network seems to expect the images that it is given."""
        return self.expected is None and self.size is None

    def describe(self) -> str:
        """Return a sentence."""
        if self.size is not None:
            rest = "" if self.expected is None else f". Also, {self._describe_normalization()}"
            return f"{self.size.describe()}{rest}"
        return self._describe_normalization()

    def _describe_normalization(self) -> str:
        if self.expected is None:
            return f"Input: {self.given.name}, and no other common normalization suits the network better."
        found, given = self.expected, self.given
        if found.error is not None and given.error is not None:
            figures = f"an error of {100 * given.error:.1f} % on the clean images, and {100 * found.error:.1f} % with"
        else:
            figures = (
                f"answers that say less about the images ({given.information:.3f} of 1) than "
                f"({found.information:.3f}) with"
            )
        if self.is_wrapped:
            advice = f"replace its normalization: ctta.models.Normalized(net, {found.mean}, {found.std})"
        elif found.name in UNDONE:
            advice = "it seems to normalize its input twice: remove one of the two"
        else:
            advice = f"give {found.options}, or return ctta.models.Normalized(net, {found.mean}, {found.std})"
        similar = f" ({' and '.join(self.similar)} do about as well: take that of its training)" if self.similar else ""
        return f"with {given.name} the network has {figures} {found.name}{similar}: {advice}"


@dataclass(frozen=True)
class _Answers:
    """What a network answers to images."""

    points: NDArray[np.float64]  # (N,) mutual information of each image and its answer
    wrong: NDArray[np.bool_] | None  # (N,); None without labels
    distance: float | None  # of the inputs of BatchNorms from their running statistics; None without BatchNorm

    @property
    def information(self) -> float:
        return float(self.points.mean())

    @property
    def error(self) -> float | None:
        return None if self.wrong is None else float(self.wrong.mean())

    @property
    def badness(self) -> float:
        """What is lowest for the best input: the error, the distance, or the negative information."""
        return next(each for each in (self.error, self.distance, -self.information) if each is not None)


@torch.no_grad()
def check_input(net: nn.Module, labeled: LabeledImages) -> InputCheck:
    """Find out whether a network expects the images that it is given.

    Args:
        net: The network, for images in [0, 1].
        labeled: Clean images.

    Returns:
        How the network does, and the size and the normalization that it expects if these are others.
    """
    some = labeled.select(slice(MAX_IMAGES))
    targets = torch.from_numpy(some.targets) if some.has_labels else None
    batches = list(iter_batches(net, some.images, BATCH_SIZE))
    size = _check_size(net, batches, targets)
    if size is not None:
        batches = [_resize(x, size.expected) for x in batches]
    inner, given = _split(net)
    is_wrapped = isinstance(net, Normalized)
    inputs = {"": given} | {name: values for name, values in NORMALIZATIONS.items() if values != given}
    if not is_wrapped:
        inputs |= UNDONE
    named = next((name for name, values in NORMALIZATIONS.items() if values == given), "the given mean and std")
    found = _compare(
        {name: partial(_answer, Normalized(inner, *values)) for name, values in inputs.items()},
        torch.cat(batches[:2]),
        batches,
        targets,
        MIN_INFORMATION,
    )

    def describe(name: str, answers: _Answers) -> Normalization:
        return Normalization(name or named, *inputs[name], answers.error, answers.information, answers.distance)

    return InputCheck(
        describe("", found.given),
        describe(found.best, found.better) if found.is_clear else None,
        found.list_similar(MIN_INFORMATION) if found.is_clear else (),
        is_wrapped=is_wrapped,
        size=size,
    )


@torch.no_grad()
def check_size(net: nn.Module, x: Tensor) -> SizeCheck | None:
    """Return the smaller size in which a network clearly does better on images (N, C, H, W) without labels, or None.

    Few images do not tell, and passes in larger sizes would take long.
    """
    return (
        None if len(x) < FEWEST_IMAGES else _check_size(net, list(x.split(BATCH_SIZE)), None, largest=min(x.shape[2:]))
    )


def read_images(
    net: nn.Module, images: ImageSource, options: ImageOptions, *, limit: int | None, seed: int = 0
) -> tuple[LabeledImages, InputCheck]:
    """Return the images that a network is judged on, and whether they are what it expects.

    Args:
        net: The network, for images in [0, 1].
        images: The images, see :func:`ctta.advise.images.gather_images`.
        options: How they are read, and whether to continue with any input.
        limit: Use at most this many.
        seed: Seed of the choice.

    Returns:
        The images with what counts as right for them, and how the network does on them.

    Raises:
        ConfigError: The network clearly expects other images.
    """
    clean = gather_images(images, options.labels, size=options.size, limit=limit, seed=seed)
    labeled = label_images(net, clean, use_labels=options.use_labels, seed=seed)
    found = check_input(net, labeled)
    if not found.is_expected and options.check_normalization:
        raise ConfigError(
            f"{found.describe()}. To continue with the network as it is, give --any-input (check_normalization=False)"
        )
    return labeled, found


def _split(net: nn.Module) -> tuple[nn.Module, tuple[Channels, Channels]]:
    """Return the network without its normalization, and the normalization."""
    if not isinstance(net, Normalized):
        return net, NORMALIZATIONS["[0, 1]"]
    mean, std = (tuple(round(float(value), 6) for value in part.flatten()) for part in (net.mean, net.std))
    return net.net, (mean, std)  # type: ignore[return-value]  # three channels, or the network would refuse the images


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)


def _check_size(
    net: nn.Module, batches: Sequence[Tensor], targets: Tensor | None, *, largest: int = max(SIZES)
) -> SizeCheck | None:
    height, width = batches[0].shape[2:]
    scales = {side: side / max(height, width) for side in SIZES if side <= largest}
    sizes = {f"{side}": (side, side) for side, scale in scales.items() if max(scale, 1 / scale) >= MIN_SCALE}

    def answer(size: tuple[int, int], batches: Sequence[Tensor], targets: Tensor | None) -> _Answers | None:
        try:
            return _answer(net, [_resize(x, size) for x in batches], targets)
        except (RuntimeError, InputError):  # a network for one size only
            return None

    asks = {"": partial(_answer, net)} | {name: partial(answer, size) for name, size in sizes.items()}
    first = batches[0][:FEWEST_IMAGES] if max(scales.values(), default=0) > 1 else batches[0]
    found = _compare(asks, first, batches[:2], targets, MIN_SIZE_INFORMATION)
    if not found.is_clear:
        return None
    return SizeCheck((height, width), sizes[found.best], found.given.information, found.better.information)


def _answer(net: nn.Module, batches: Sequence[Tensor], targets: Tensor | None) -> _Answers:
    """Return what a network answers to images, and which answers are wrong, if the labels are known."""
    frozen = copy_for_adaptation(net, batch_stats=0, output=None)
    layers = [module for module in frozen.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    distances: list[float] = []
    for layer in layers:
        layer.register_forward_pre_hook(_measure_distance(distances))
    logits = torch.cat([frozen(x).float().cpu() for x in batches])
    probabilities = logits.double().softmax(1).nan_to_num(0.0)
    marginal = probabilities.mean(0).clamp(min=torch.finfo(torch.float64).tiny)
    points = torch.special.xlogy(probabilities, probabilities) - probabilities * marginal.log()
    information = (points.sum(1) / math.log(max(2, probabilities.shape[1]))).numpy()
    wrong = None if targets is None else (logits.argmax(1) != targets).numpy()
    return _Answers(information, wrong, float(np.mean(distances)) if distances else None)


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


#: Returns what a network answers to batches in some form, given targets if there are labels; None if it cannot.
_Ask = Callable[[Sequence[Tensor], Tensor | None], _Answers | None]


@dataclass(frozen=True)
class _Comparison:
    """What a network answers to images as they are given, and to the best of the other forms of them."""

    first: Mapping[str, _Answers]  # to the first images in all forms, of which "" is the given one
    best: str
    given: _Answers  # to all images
    better: _Answers
    is_clear: bool  # whether the best form clearly suits the network better than the given one

    def list_similar(self, least: float) -> tuple[str, ...]:
        """Return the forms in which the network does about as well as in the best one."""
        best = self.first[self.best]
        others = {name: each for name, each in self.first.items() if name not in ("", self.best)}
        if best.error is not None:
            limit = best.error + MIN_GAIN
            return tuple(name for name, each in others.items() if each.error is not None and each.error < limit)
        return tuple(name for name, each in others.items() if not _is_clear(best.points - each.points, least))


def _compare(
    asks: Mapping[str, _Ask], few: Tensor, batches: Sequence[Tensor], targets: Tensor | None, least: float
) -> _Comparison:
    """Find the best form of images on the first few, and compare it with the given one, which is named "", on all."""
    answers = {name: ask([few], None if targets is None else targets[: len(few)]) for name, ask in asks.items()}
    first = {name: each for name, each in answers.items() if each is not None}
    best = min(first, key=lambda name: first[name].badness)
    if not best:
        return _Comparison(first, "", first[""], first[""], is_clear=False)
    labels = None if targets is None else targets[: sum(map(len, batches))]
    given, better = (asks[name](batches, labels) for name in ("", best))
    assert given is not None, "the network answers to what it is given"
    assert better is not None, "and to what it answered to before"
    return _Comparison(first, best, given, better, _is_better(better, given, least))


def _is_better(one: _Answers, other: _Answers, least: float) -> bool:
    """Return whether a network clearly does better in one form of images than in another.

    Without labels the information has to be higher, by ``least`` or more, or BatchNorm's inputs closer by a factor.
    """
    if one.wrong is not None and other.wrong is not None:
        return _is_clear(other.wrong.astype(float) - one.wrong.astype(float), MIN_GAIN)
    if one.distance is not None and other.distance is not None:
        return other.distance > MIN_CLOSER * one.distance and one.information > other.information
    return _is_clear(one.points - other.points, least)


def _is_clear(gains: NDArray[np.float64], least: float) -> bool:
    """Return whether a mean gain over images is more than noise, and at least a number."""
    error = float(gains.std()) / math.sqrt(len(gains))
    return float(gains.mean()) > max(least, MIN_DEVIATIONS * error)
