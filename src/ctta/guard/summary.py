"""Statistics of predictions, computed where the predictions are, and read from there at once."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ctta.functional import at_least_float32, widest_float

NUM_BINS = 64  # more classes share bins, so that histories have a fixed size
NUM_NEIGHBORS = 4  # images before and after one, in its batch, that it is compared with
NUM_COUNTS = 7  # that :func:`measure_answers` begins with


class Readout:
    """Numbers on a device that are read together, in one transfer, when the first of them is needed.

    An accelerator stalls at each read.

    >>> readout = Readout()
    >>> one, other = readout.add(torch.tensor(1.0)), readout.add(torch.tensor([2, 3]))
    >>> other.values.tolist()
    [2.0, 3.0]
    """

    def __init__(self) -> None:
        self._waiting: list[Reading] = []

    def add(self, values: Tensor) -> "Reading":
        """Return what will have the values, a scalar or a vector."""
        reading = Reading(self, values.detach().reshape(-1))
        self._waiting.append(reading)
        return reading

    def read_(self) -> None:
        """Read whatever waits."""
        waiting, self._waiting = self._waiting, []
        device = waiting[0]._values.device
        dtype = widest_float(device)
        values = torch.cat([each._values.to(device, dtype) for each in waiting]).cpu().double()
        for reading, own in zip(waiting, values.split([len(each._values) for each in waiting]), strict=True):
            reading._values, reading._readout = own, None


class Reading:
    """Numbers of a :class:`Readout`."""

    def __init__(self, readout: Readout, values: Tensor) -> None:
        self._readout: Readout | None = readout
        self._values = values

    @property
    def values(self) -> Tensor:
        """The numbers, on the host in float64."""
        if self._readout is not None:
            self._readout.read_()
        return self._values

    def __float__(self) -> float:
        """Return the only number."""
        return self.values.item()


@dataclass(frozen=True, eq=False)
class PredictionSummary:
    """Statistics of one network's predictions on a batch, which are read from the device when they are needed."""

    readout: Readout
    statistics: Reading  # confidence, both entropies, agreement, and the mean prediction in NUM_BINS bins
    num_bins: int  # that classes fall into, at most NUM_BINS
    classes: Tensor
    confidences: Tensor  # of each element
    _readings: dict[tuple[str, "PredictionSummary | None"], Reading] = field(default_factory=dict, repr=False)

    @property
    def confidence(self) -> float:
        """Mean probability of the most probable class."""
        return self.statistics.values[0].item()

    @property
    def entropy(self) -> float:
        """Mean entropy of the predictions."""
        return self.statistics.values[1].item()

    @property
    def mean_prediction_entropy(self) -> float:
        """Entropy of the mean prediction."""
        return self.statistics.values[2].item()

    @property
    def agreement_within(self) -> float | None:
        """Probability that two elements share a class; None for a single one."""
        return self.statistics.values[3].item() if self.classes.numel() > 1 else None

    @property
    def mean_prediction(self) -> Tensor:
        """The mean prediction in NUM_BINS bins, on the host."""
        return self.statistics.values[4:]

    @property
    def is_finite(self) -> bool:
        """Whether the predictions are finite."""
        return bool(self.statistics.values[:4].isfinite().all())

    def count_differences(self, other: "PredictionSummary") -> Reading:
        """Return the number of elements for which two networks predict different classes."""
        return self._read("differences", other, lambda: (self.classes != other.classes).sum())

    def compare_confidences(self, other: "PredictionSummary") -> Reading:
        """Return mean and standard deviation of how much more confident this network is in an element."""

        def compute() -> Tensor:
            lead = (self.confidences - other.confidences).to(widest_float(self.confidences.device))
            return torch.stack([lead.mean(), lead.std()])

        return self._read("confidences", other, compute)

    def compare_answers(self, other: "PredictionSummary") -> Reading:
        """Return what an estimate of gain needs, see :func:`measure_answers`."""
        return self._read("answers", other, lambda: measure_answers(self.classes, other.classes))

    def read_classes(self) -> Reading:
        """Return the predicted classes."""
        return self._read("classes", None, lambda: self.classes)

    def _read(self, name: str, other: "PredictionSummary | None", compute: Callable[[], Tensor]) -> Reading:
        if (key := (name, other)) not in self._readings:
            self._readings[key] = self.readout.add(compute())
        return self._readings[key]


@torch.no_grad()
def summarize(logits: Tensor, readout: Readout | None = None) -> PredictionSummary:
    """Summarize logits of shape (N, C, ...), to be read with whatever else is in the readout."""
    readout, dtype = readout or Readout(), widest_float(logits.device)
    logs = at_least_float32(logits).log_softmax(1)
    probabilities = logs.exp()
    by_class = probabilities.transpose(0, 1).flatten(1)  # (classes, elements)
    mean = by_class.mean(1, dtype=dtype)
    bins = torch.arange(len(by_class), device=by_class.device) % NUM_BINS
    flat = by_class.new_zeros(NUM_BINS, by_class.shape[1]).index_add_(0, bins, by_class)  # (bins, elements)
    count = flat.shape[1]
    total = flat.sum(1, dtype=dtype)
    own = (flat * flat).sum(dtype=dtype)
    confidences = probabilities.amax(1)
    numbers = torch.stack(
        [
            confidences.mean(dtype=dtype),
            -(probabilities * logs.clamp_min(-1e4)).sum(1).mean(dtype=dtype),
            -(mean * mean.clamp_min(1e-30).log()).sum(),
            (total.square().sum() - own) / max(count * (count - 1), 1),
        ]
    )
    return PredictionSummary(
        readout=readout,
        statistics=readout.add(torch.cat([numbers, total / count])),
        num_bins=min(logits.shape[1], NUM_BINS),
        classes=logits.argmax(1),
        confidences=confidences,
    )


def disagreement(one: PredictionSummary, other: PredictionSummary) -> float:
    """Return the fraction of elements for which two networks predict different classes."""
    return float(one.count_differences(other)) / one.classes.numel()


@torch.no_grad()
def measure_answers(adapted: Tensor, source: Tensor) -> Tensor:
    """Return what an estimate needs of the classes that two networks answer to one batch, as one vector of counts.

    Args:
        adapted: The classes (N) of the adapted network, in the order of time.
        source: Those of the network without adaptation.
    """
    differs = adapted != source
    everything = torch.ones_like(differs)
    dtype = widest_float(adapted.device)

    def count_pairs(one: Tensor, other: Tensor, chosen: Tensor) -> list[Tensor]:
        """Count pairs of a chosen image and a neighbor, and those in which ``one`` of the neighbor is ``other``."""
        pairs = agreeing = torch.zeros((), dtype=dtype, device=one.device)
        for lag in range(1, min(NUM_NEIGHBORS, len(one) - 1) + 1):
            for near, own, is_chosen in (
                (one[:-lag], other[lag:], chosen[lag:]),
                (one[lag:], other[:-lag], chosen[:-lag]),
            ):
                pairs = pairs + is_chosen.sum()
                agreeing = agreeing + ((near == own) & is_chosen).sum()
        return [pairs, agreeing]

    def count_classes(classes: Tensor, chosen: Tensor) -> Tensor:
        return torch.zeros(NUM_BINS, dtype=dtype, device=classes.device).index_add_(
            0, classes % NUM_BINS, chosen.to(dtype)
        )

    all_pairs, source_repeats = count_pairs(source, source, everything)
    _, adapted_repeats = count_pairs(adapted, adapted, everything)
    pairs, source_agrees = count_pairs(source, source, differs)
    _, adapted_agrees = count_pairs(source, adapted, differs)
    counts = [differs.sum(), all_pairs, source_repeats, adapted_repeats, pairs, source_agrees, adapted_agrees]
    classes = [count_classes(each, chosen) for chosen in (everything, differs) for each in (source, adapted)]
    return torch.cat([torch.stack([each.to(dtype) for each in counts]), *classes])
