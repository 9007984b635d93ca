"""The gain of adaptation over no adaptation, estimated without labels from what two networks answer.

Where both answer the same, nothing is gained or lost. Where they differ, one of them is more plausible: the one whose
answers keep all classes in use, or, where labels repeat in time, the one that agrees with its neighbors in time. And
statistics of a batch can only help where the inputs are not normalized as those of the training were. How much each of
these signs is worth was fitted by ``benchmarks/choose/estimated_gain.py`` on networks and corruptions that no reported
figure uses. That the source is sure of its answers, and that many of them change, are no signs of harm: networks that
are sure of everything are common.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.parallel import change_call, current_call
from ctta.core.state import CpuState
from ctta.guard.summary import NUM_BINS, NUM_COUNTS
from ctta.nn.moments import batch_var_mean
from ctta.nn.norm import NormHook

MIN_IMAGES = 64  # before there is an estimate
BLOCK_IMAGES = 128  # that signals are computed of; two blocks are remembered
NUM_CHANNELS = 16  # of each BatchNorm, at most, that tell how its input is shifted
REPETITION = 0.2  # of labels from which neighbors in time count fully
NO_SHIFT, USUAL_SHIFT = 0.005, 0.04  # divergences of inputs of BatchNorm that training images have, and a corruption
MAX_SHIFT = (-0.4, 0.7)  # powers of ten between which the divergence counts


class Weights(NamedTuple):
    """What each sign is worth; the hyperbolic tangent of their sum is the gain per answer that differs."""

    constant: float = 0.0
    more_even: float = 0.0  # entropy of the answered classes above the source's
    more_even_shifted: float = 0.0  # the same times the shift of the inputs of BatchNorm
    less_even: float = 0.0  # entropy below the source's, so that it is negative
    neighbors: float = 0.0  # agreement with the source's answers nearby, where labels repeat
    repetition: float = 0.0  # of the answers above the source's, where labels repeat
    smoothing: float = 0.0  # the same where labels do not repeat, so that it is invented
    batch_norm: float = 0.0  # whether there is BatchNorm
    shift: float = 0.0  # of the inputs of BatchNorm, where labels do not repeat


WEIGHTS = Weights(0.02, -1.8, 2.22, 0.76, 1.73, 0.74, -0.83, -0.05, 0.86)
SPREAD = 0.25  # standard deviation of the gain per answer that differs, about its estimate
#: How many standard deviations the interval reaches towards zero and away from it. Signs that are weak in one network
#: are strong in another, so that gains are underestimated more often than mistaken for losses.
INNER, OUTER = 1.0, 2.0
#: How many standard deviations below zero a guard lets the source answer. That costs little if it is wrong, so it takes
#: less than to claim harm; chosen by ``benchmarks/results/guard_matrix.py``.
CAUTION = 0.5


@dataclass(frozen=True)
class GainEstimate:
    """A gain that was estimated without labels.

    Attributes:
        gain: Accuracy above that of the network without adaptation.
        deviation: Its standard deviation.
        num_images: Images that it was estimated from.
        since: Step of the first of them; it stands for all images from there on.
    """

    gain: float
    deviation: float
    num_images: int = 0
    since: int = 0

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return max(-1.0, self.gain - self.deviation * (INNER if self.gain > 0 else OUTER))

    @property
    def high(self) -> float:
        """Upper end."""
        return min(1.0, self.gain + self.deviation * (OUTER if self.gain > 0 else INNER))

    @property
    def is_harmful(self) -> bool:
        """Whether the whole interval is below zero."""
        return self.high < 0

    @property
    def suggests_harm(self) -> bool:
        """Whether harm is likely enough for the source to answer, though it may not be certain enough to be claimed."""
        return self.gain + CAUTION * self.deviation < 0

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes zero; else it cannot be told whether adaptation helps."""
        return self.low > 0 or self.high < 0

    def as_signals(self) -> dict[str, Any]:
        """Return the fields of :class:`~ctta.guard.Health`."""
        return {
            "estimated_gain": self.gain,
            "estimated_gain_low": self.low,
            "estimated_gain_high": self.high,
            "estimated_images": self.num_images,
            "estimated_since": self.since,
        }

    def __str__(self) -> str:
        low, high = 100 * self.low, 100 * self.high
        return f"adapting: {100 * self.gain:+.1f} points of accuracy ({low:+.1f} to {high:+.1f}), estimated"


class InputShift(NormHook):
    """Let a BatchNorm leave mean and variance of its input where a call records them; nothing else changes."""

    is_traceable = True

    @override
    def before(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        if torch.compiler.is_compiling() or (record := current_call().record) is None:
            return
        assert layer.running_mean is not None, "the hook is attached to such layers only"
        variance, mean = batch_var_mean(inputs[0].detach().to(layer.running_mean.dtype))
        record[layer] = mean.flatten(), variance.flatten()


@contextmanager
def record_inputs() -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Record what reaches the BatchNorms of the network as trained within the context, for :func:`measure_inputs`."""
    record: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    with change_call(record=record):
        yield record


def measure_inputs(net: nn.Module, record: dict[nn.Module, tuple[Tensor, Tensor]]) -> Tensor:
    """Return mean and mean square of some channels of each layer, in units of its running statistics, as one vector.

    Layers that did not run, such as those of a head for training, have no weight. Without BatchNorm it is empty.
    """
    parts = []
    for layer in _list_layers(net):
        assert layer.running_mean is not None and layer.running_var is not None
        known_mean, known_variance = (_choose_channels(each) for each in (layer.running_mean, layer.running_var))
        if layer not in record:
            parts.append(known_mean.new_zeros(3, len(known_mean)))
            continue
        mean, variance = (_choose_channels(each) for each in record[layer])
        scale = (known_variance + layer.eps).sqrt()
        offset = (mean - known_mean) / scale
        square = variance / scale.square() + offset.square()
        # Layers count the same, however many channels they have.
        parts.append(torch.stack([offset, square, torch.full_like(offset, 1 / len(offset))]))
    return torch.cat(parts, 1).flatten() if parts else torch.zeros(0)


def count_inputs(net: nn.Module) -> int:
    """Return the length of what :func:`measure_inputs` returns for a network."""
    return 3 * sum(len(_choose_channels(torch.empty(layer.num_features))) for layer in _list_layers(net))


def _list_layers(net: nn.Module) -> list[_BatchNorm]:
    return [module for module in net.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None]


def _choose_channels(values: Tensor) -> Tensor:
    return values[:: max(1, len(values) // NUM_CHANNELS)][:NUM_CHANNELS]


class GainMonitor(CpuState):
    """What was measured of the images of a stream, in two blocks of at least 128, so that a saved stream resumes.

    Labels correct it: :meth:`recalibrate_` moves estimates by what labels have shown, weighed against the uncertainty
    of the estimate. Labels count by how similar the estimate of their time is to the present one.

    Args:
        num_inputs: Length of what :func:`measure_inputs` returns for the network.
        weights: What the signs are worth.
    """

    answers: Tensor
    inputs: Tensor
    num_images: Tensor
    num_bins: Tensor
    since: Tensor
    earlier: Tensor
    offset: Tensor
    width_factor: Tensor

    def __init__(self, num_inputs: int, weights: Sequence[float] = WEIGHTS) -> None:
        super().__init__()
        self.weights = weights
        self.register_buffer("answers", torch.zeros(2, NUM_COUNTS + 4 * NUM_BINS, dtype=torch.float64))
        self.register_buffer("inputs", torch.zeros(2, num_inputs, dtype=torch.float64))
        self.register_buffer("num_images", torch.zeros(2, dtype=torch.long))
        self.register_buffer("num_bins", torch.tensor(1))  # that classes fall into
        self.register_buffer("since", torch.zeros(3, dtype=torch.long))  # steps; the last one is of the first image
        # Of blocks that were left behind: images, and sums over them of the gain and of the fraction that differs.
        self.register_buffer("earlier", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("offset", torch.zeros((), dtype=torch.float64))
        self.register_buffer("width_factor", torch.ones((), dtype=torch.float64))  # of the interval

    @torch.inference_mode(False)
    def add_(self, answers: Tensor, inputs: Tensor, num_images: int, step: int, num_bins: int) -> None:
        """Take a batch into the newer block, or begin a new one with it.

        Args:
            answers: The result of :func:`~ctta.guard.summary.measure_answers`, on the host.
            inputs: That of :func:`measure_inputs`.
            num_images: Images in the batch.
            step: Number of batches before this one.
            num_bins: Number of classes, at most 64.
        """
        self.num_bins.fill_(num_bins)
        if int(self.num_images[1]) >= BLOCK_IMAGES:
            self._leave_block_behind_()
        if int(self.num_images[1]) == 0:
            self.since[1] = step
            if int(self.num_images[0]) == 0 and float(self.earlier[0]) == 0:
                self.since[0] = self.since[2] = step
        self.answers[1] += answers.to(self.answers)
        self.inputs[1] += num_images * inputs.to(self.inputs)
        self.num_images[1] += num_images

    def _leave_block_behind_(self) -> None:
        if int(self.num_images[0]) > 0:
            self.earlier += self._sum_blocks([0])
        for buffer in (self.answers, self.inputs, self.num_images, self.since[:2]):
            buffer[0] = buffer[1]
        for buffer in (self.answers, self.inputs, self.num_images):
            buffer[1] = 0

    def forget_(self) -> None:
        """Start anew, as after a remedy, since neither answers nor labels of before say anything about what follows."""
        for buffer in (self.answers, self.inputs, self.num_images, self.earlier):
            buffer.zero_()
        self._forget_labels_()

    def estimate(self) -> GainEstimate | None:
        """Return the estimate for the last 128 to 256 images, corrected by labels; None if there are too few."""
        if (found := self.estimate_without_labels()) is None:
            return None
        gain = min(max(found.gain + float(self.offset), -1.0), 1.0)
        return replace(found, gain=gain, deviation=found.deviation * float(self.width_factor))

    def estimate_without_labels(self) -> GainEstimate | None:
        """Return what the answers alone stand for; None if there are too few."""
        return self._combine([self._sum_blocks([block]) for block in self._list_blocks()], int(self.since[0]))

    def list_estimates(self) -> list[GainEstimate]:
        """Return the estimate, and that of the newest images alone; none for too few images."""
        newest = self._combine([self._sum_blocks([1])], int(self.since[1])) if 1 in self._list_blocks() else None
        return [found for found in (self.estimate(), newest) if found is not None]

    def estimate_all(self) -> GainEstimate | None:
        """Return the estimate for all images since the first, without labels; None if there are too few."""
        blocks = [[block] for block in self._list_blocks()]
        if blocks == [[0]]:
            blocks = [[0, 1]]  # while the newer one has too few images for signs of its own
        return self._combine([*map(self._sum_blocks, blocks), self.earlier], int(self.since[2]))

    def _list_blocks(self) -> list[int]:
        """Return the blocks with enough images; the newer one may have just begun."""
        return [block for block in (0, 1) if int(self.num_images[block]) >= MIN_IMAGES]

    def _combine(self, sums: Sequence[Tensor], since: int) -> GainEstimate | None:
        number, gain, differing = torch.stack([*sums, torch.zeros(3, dtype=torch.float64)]).sum(0).tolist()
        if number == 0:
            return None
        share = differing / number
        # The answers that differ are a sample, too, and there may be none of them yet.
        deviation = math.sqrt((SPREAD * share) ** 2 + (share + 1 / number) / number)
        return GainEstimate(gain / number, deviation, int(number), since)

    def _sum_blocks(self, blocks: list[int]) -> Tensor:
        """Return the number of images of blocks, and sums over them of the gain and of the fraction that differs."""
        number, differing = float(self.num_images[blocks].sum()), float(self.answers[blocks, 0].sum())
        signs = self.measure_signs(blocks)
        rate = math.tanh(sum(weight * sign for weight, sign in zip(self.weights, signs, strict=True)))
        return torch.tensor([number, rate * differing, differing], dtype=torch.float64)

    def measure_signs(self, blocks: list[int]) -> tuple[float, ...]:
        """Return the signs that :class:`Weights` weigh, of blocks together."""
        number, answers = float(self.num_images[blocks].sum()), self.answers[blocks].sum(0)
        counts, classes = answers[:NUM_COUNTS].tolist(), answers[NUM_COUNTS:].view(4, NUM_BINS)
        differing, all_pairs, source_repeats, adapted_repeats, pairs, source_agrees, adapted_agrees = counts
        source, adapted = classes[:2] / number
        largest = math.log(max(2, int(self.num_bins)))
        evenness = (_entropy(adapted) - _entropy(source)) / largest
        # How often neighbors agree beyond chance, which is how often any two images of the block do.
        repeats = [
            found / max(all_pairs, 1.0) - float(shares.square().sum()) * (all_pairs > 0)
            for found, shares in ((source_repeats, source), (adapted_repeats, adapted))
        ]
        chances = (classes[2:] @ source / max(differing, 1.0)).tolist()
        nearby = [
            found / max(pairs, 1.0) - chance * (pairs > 0)
            for found, chance in zip((source_agrees, adapted_agrees), chances, strict=True)
        ]
        labels_repeat = min(max(repeats[0] / REPETITION, 0.0), 1.0)
        has_norms, shift = self.inputs.shape[1] > 0, self.measure_shift(blocks)
        return (
            1.0,
            max(evenness, 0.0),
            max(evenness, 0.0) * shift,
            min(evenness, 0.0),
            labels_repeat * (nearby[1] - nearby[0]),
            labels_repeat * (repeats[1] - repeats[0]),
            (1 - labels_repeat) * (repeats[1] - repeats[0]),
            float(has_norms),
            (1 - labels_repeat) * shift,
        )

    def measure_shift(self, blocks: list[int]) -> float:
        """Return how far the inputs of BatchNorm are from those of training, in powers of ten; 0 without BatchNorm.

        It is the logarithm of the mean divergence (Kullback-Leibler) of normal distributions with these moments.
        """
        inputs, number = self.inputs[blocks].sum(0), float(self.num_images[blocks].sum())
        offset, square, weight = (inputs / number).view(3, -1)
        if float(weight.sum()) == 0:
            return 0.0
        variance = (square - offset.square()).clamp_min(1e-8)
        divergences = (variance + offset.square() - 1 - variance.log()) / 2
        divergence = float((weight * divergences).sum() / weight.sum())
        low, high = MAX_SHIFT
        return min(max(math.log10((divergence + NO_SHIFT) / USUAL_SHIFT), low), high)

    @torch.inference_mode(False)
    def recalibrate_(self, errors: Tensor, estimates: Tensor) -> None:
        """Move estimates by what labels have shown, as :meth:`AnswerLog.list_estimate_errors` returns it."""
        now = self.estimate_without_labels()
        if len(errors) == 0 or now is None:
            self._forget_labels_()
            return
        # Labels count by how similar the domain of their time is, by what was estimated of it without labels.
        weights = ((estimates - now.gain) / (now.deviation + 1e-6)).square().div(-2).exp()
        number = weights.sum()
        mean = (weights * errors).sum() / number
        # One is added to the squares, or a few labels that agree would count as certain.
        variance = ((weights * (errors - mean).square()).sum() + 1) / (number * (number + 1))
        prior = now.deviation**2
        share = prior / (prior + float(variance))
        self.offset.copy_(share * mean)
        self.width_factor.fill_(math.sqrt(1 - share))

    def _forget_labels_(self) -> None:
        self.offset.zero_()
        self.width_factor.fill_(1.0)


def _entropy(shares: Tensor) -> float:
    return -float((shares * shares.clamp_min(1e-30).log()).sum())
