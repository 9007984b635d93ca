"""The accuracy of a stream without labels: of the adapted network, of its source, and the difference.

A network that is unsure, or whose answers adaptation changes, is wrong more often. How often, is a property of the
network and the method, so it is measured: :func:`ctta.calibrate_gain` fits accuracy to three signals of corrupted
images with known answers, and how far the fit is off for corruptions and images that it has not seen is the half-width
of the interval.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ctta.core.state import CpuState
from ctta.errors import ConfigError
from ctta.guard.summary import PredictionSummary, disagreement

NUM_SIGNALS = 4  # with the constant
MIN_IMAGES = 100  # before there is an estimate
MEMORY_IMAGES = 250.0  # that the averages of the signals stand for
SIMILAR_WITHIN = 1.0  # half-widths of the intervals within which domains count as similar
_CLIP = 0.005
_Z_90 = 1.645  # of a two-sided interval of 90 %


@dataclass(frozen=True)
class GainEstimator:
    """How accuracy follows from what shows without labels, for one network and method.

    The logit of the accuracy is a weighted sum of one, the logit of the mean confidence, the logit of the agreement of
    adapted and plain answers, and the entropy of the mean prediction relative to its largest value.

    Attributes:
        weights: The weights for the adapted network.
        source_weights: The weights for the network without adaptation.
        half_width: Half of the 90 % interval of the accuracy of the adapted network.
        source_half_width: The same for the network without adaptation.
        gain_half_width: The same for their difference.
    """

    weights: tuple[float, ...]
    source_weights: tuple[float, ...]
    half_width: float
    source_half_width: float
    gain_half_width: float

    def __post_init__(self) -> None:
        for name in ("weights", "source_weights"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
            if len(getattr(self, name)) != NUM_SIGNALS:
                raise ConfigError(f"{name} must be {NUM_SIGNALS} numbers, got {getattr(self, name)}")

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes for ``ctta.toml`` and JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def estimate(self, signals: Sequence[float], source_signals: Sequence[float]) -> "GainEstimate":
        """Return the accuracies that signals stand for.

        Args:
            signals: Those of the adapted network, as :func:`to_signals` returns them.
            source_signals: Those of the network without adaptation.

        Returns:
            The estimate with its 90 % intervals.
        """
        accuracy, source_accuracy = (
            1 / (1 + math.exp(-sum(weight * value for weight, value in zip(weights, values, strict=True))))
            for weights, values in ((self.weights, signals), (self.source_weights, source_signals))
        )
        return GainEstimate(accuracy, source_accuracy, self.gain_half_width)


@dataclass(frozen=True)
class GainEstimate:
    """Accuracies that were estimated without labels.

    Attributes:
        accuracy: That of the adapted network.
        source_accuracy: That of the network without adaptation.
        gain_half_width: Half of the 90 % interval of their difference.
    """

    accuracy: float
    source_accuracy: float
    gain_half_width: float

    @property
    def gain(self) -> float:
        """Accuracy above that of the network without adaptation."""
        return self.accuracy - self.source_accuracy

    def as_signals(self) -> dict[str, float]:
        """Return the fields of :class:`~ctta.guard.Health`."""
        return {
            "estimated_accuracy": self.accuracy,
            "estimated_source_accuracy": self.source_accuracy,
            "estimated_gain": self.gain,
            "estimated_gain_low": self.gain - self.gain_half_width,
            "estimated_gain_high": self.gain + self.gain_half_width,
        }

    @property
    def is_harmful(self) -> bool:
        """Whether the whole 90 % interval of the gain is below zero."""
        return self.gain + self.gain_half_width < 0

    def __str__(self) -> str:
        return f"adapting: {100 * self.gain:+.1f} ± {100 * self.gain_half_width:.1f} points, estimated"


def to_signals(confidence: float, agreement: float, evenness: float) -> tuple[float, ...]:
    """Return what the accuracy is a weighted sum of, see :class:`GainEstimator`; the constant comes first.

    >>> to_signals(0.5, 0.5, 1.0)
    (1.0, 0.0, 0.0, 1.0)
    """
    return 1.0, _logit(confidence), _logit(agreement), evenness


def measure(summary: PredictionSummary, source: PredictionSummary) -> tuple[float, ...]:
    """Return what an estimate needs of one batch: both confidences, the agreement, and both evennesses.

    An evenness is the entropy of the mean prediction, relative to its largest value.
    """
    largest = math.log(max(2, summary.num_bins))
    evenness = [each.mean_prediction_entropy / largest for each in (summary, source)]
    return summary.confidence, source.confidence, 1 - disagreement(summary, source), *evenness


class GainMonitor(CpuState):
    """Averages of the signals over the last inspected batches, in buffers, so that a saved stream resumes.

    Labels correct it: :meth:`recalibrate_` moves estimates by what labels have shown, weighed against the uncertainty
    that the estimator was calibrated to have. Labels count by how similar the domain of their time is to the present.
    """

    averages: Tensor
    num_images: Tensor
    offsets: Tensor
    width_factor: Tensor

    def __init__(self, estimator: GainEstimator) -> None:
        super().__init__()
        self.estimator = estimator
        self.register_buffer("averages", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("num_images", torch.zeros((), dtype=torch.float64))
        self.register_buffer("offsets", torch.zeros(2, dtype=torch.float64))  # of the gain and the source's accuracy
        self.register_buffer("width_factor", torch.ones((), dtype=torch.float64))  # of the interval

    @torch.inference_mode(False)
    def add_(self, summary: PredictionSummary, source: PredictionSummary) -> None:
        """Take the signals of an inspected batch into the averages."""
        if not (summary.is_finite and source.is_finite):
            return
        number = summary.classes.numel()
        self.num_images += number
        share = number / min(max(float(self.num_images), 1.0), MEMORY_IMAGES + number)
        self.averages.lerp_(torch.tensor(measure(summary, source)).to(self.averages), share)

    def forget_(self) -> None:
        """Start anew, as after a remedy, since neither signals nor labels of before say anything about what follows."""
        self.averages.zero_()
        self.num_images.zero_()
        self._forget_labels_()

    def estimate(self) -> GainEstimate | None:
        """Return the estimate; None until enough images were inspected."""
        if (found := self.estimate_without_labels()) is None:
            return None
        gain_offset, source_offset = self.offsets.tolist()
        source_accuracy = min(max(found.source_accuracy + source_offset, 0.0), 1.0)
        accuracy = min(max(source_accuracy + found.gain + gain_offset, 0.0), 1.0)
        return GainEstimate(accuracy, source_accuracy, found.gain_half_width * float(self.width_factor))

    def estimate_without_labels(self) -> GainEstimate | None:
        """Return what the signals alone stand for; None until enough images were inspected."""
        if float(self.num_images) < MIN_IMAGES:
            return None
        confidence, source_confidence, agreement, evenness, source_evenness = self.averages.tolist()
        return self.estimator.estimate(
            to_signals(confidence, agreement, evenness), to_signals(source_confidence, agreement, source_evenness)
        )

    @torch.inference_mode(False)
    def recalibrate_(self, errors: Tensor, estimates: Tensor) -> None:
        """Move estimates by what labels have shown, as :meth:`AnswerLog.list_estimate_errors` returns it."""
        weights = self._compare_domains(estimates).unsqueeze(1)
        number = weights.sum()
        if number == 0:
            self._forget_labels_()
            return
        means = (weights * errors).sum(0) / number
        # One is added to the squares, or a few labels that agree would count as certain.
        standard_errors = ((weights * (errors - means).square()).sum(0) + 1).div(number * (number + 1)).sqrt()
        half_widths = self.estimator.gain_half_width, self.estimator.source_half_width
        shares = [_weigh(*each) for each in zip(half_widths, standard_errors.tolist(), strict=True)]
        self.offsets.copy_(means.new_tensor(shares) * means)
        self.width_factor.fill_(math.sqrt(1 - shares[0]))

    def _forget_labels_(self) -> None:
        self.offsets.zero_()
        self.width_factor.fill_(1.0)

    def _compare_domains(self, estimates: Tensor) -> Tensor:
        """Return how similar domains are to the present one, by what was estimated of them (N, 2) without labels.

        It is 1 where the estimates are those of now, and about nothing where they are several of their own intervals
        away.
        """
        if (now := self.estimate_without_labels()) is None:
            return torch.ones_like(estimates[:, 0])
        widths = estimates.new_tensor([self.estimator.gain_half_width, self.estimator.source_half_width])
        offsets = estimates - estimates.new_tensor([now.gain, now.source_accuracy])
        return (offsets / (SIMILAR_WITHIN * widths + 1e-6)).square().sum(1).div(-2).exp()


def _weigh(half_width: float, standard_error: float) -> float:
    """Return the weight of labels beside an estimate whose 90 % interval has this half-width."""
    variance = (half_width / _Z_90) ** 2
    return variance / (variance + standard_error**2)


def _logit(value: float) -> float:
    clipped = min(max(value, _CLIP), 1 - _CLIP)
    return math.log(clipped / (1 - clipped))
