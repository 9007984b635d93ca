"""What is known of accuracy: by a few delayed labels for the last answers, and by an estimate without any."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ctta.core.state import CpuState
from ctta.core.validation import check_integer
from ctta.errors import ConfigError, InputError
from ctta.guard.estimate import GainEstimate, GainMonitor

UNKNOWN = -1
Z_95 = 1.96  # of a two-sided interval of 95 %


@dataclass(frozen=True)
class FeedbackSummary:
    """What labels say about the last answers, adapted and not.

    The gain is unbiased if it does not depend on the answers which of them are labeled: for example every hundredth,
    and not only those that looked wrong. Its interval is that of Agresti and Min for paired answers.

    Attributes:
        num_labels: Labels among the answers that are remembered.
        accuracy: Fraction of right answers among the labeled ones; None without labels.
        source_accuracy: The same for the network without adaptation.
        gain: ``accuracy`` minus ``source_accuracy``.
        low: Lower end of the 95 % interval of the gain.
        high: Upper end.
    """

    num_labels: int
    accuracy: float | None = None
    source_accuracy: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_harmful(self) -> bool:
        """Whether adaptation harms by more than noise: the whole interval of the gain is below zero."""
        return self.high is not None and self.high < 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.gain is None or self.low is None or self.high is None:
            return "no labels"
        half = 50 * (self.high - self.low)
        return f"adapting: {100 * self.gain:+.1f} ± {half:.1f} points by {self.num_labels} labels"


class AnswerLog(CpuState):
    """The last answers, in buffers of a fixed size. An answer has an id: the number of answers before it.

    Args:
        size: How many answers are remembered.
        first_id: The id of the first one.

    >>> log = AnswerLog(100)
    >>> log.add_(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]))
    range(0, 3)
    >>> log.set_labels_([1, 2], [1, 2])
    0
    >>> log.summarize().gain
    0.5
    """

    classes: Tensor
    source_classes: Tensor
    labels: Tensor
    estimates: Tensor
    count: Tensor

    def __init__(self, size: int, first_id: int = 0) -> None:
        super().__init__()
        self.size = check_integer("size", size, 1, 10**6)
        for name in ("classes", "source_classes", "labels"):
            self.register_buffer(name, torch.full((self.size,), UNKNOWN))
        # The gain, as it was estimated without labels at the time.
        self.register_buffer("estimates", torch.full((self.size,), nan, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(first_id))

    @property
    def num_answered(self) -> int:
        """Number of answers so far, the id of the next one."""
        return int(self.count)

    @torch.inference_mode(False)
    def add_(self, classes: Tensor, source_classes: Tensor, estimate: GainEstimate | None = None) -> range:
        """Remember answers beside the source's.

        Args:
            classes: The answered classes.
            source_classes: The source's.
            estimate: The gain as it is estimated now without labels; None if it is not.

        Returns:
            The ids of the answers.
        """
        ids = range(self.num_answered, self.num_answered + len(classes))
        kept = torch.tensor(ids[-self.size :], device=self.classes.device)
        rows = kept % self.size
        for buffer, values in ((self.classes, classes), (self.source_classes, source_classes)):
            buffer[rows] = values.detach()[-self.size :].to(buffer)
        self.labels[rows] = UNKNOWN
        self.estimates[rows] = nan if estimate is None else estimate.gain
        self.count += len(classes)
        return ids

    def set_labels_(self, ids: Sequence[int] | Tensor, labels: Sequence[int] | Tensor) -> int:
        """Remember the labels of answers.

        Args:
            ids: The ids of the answers.
            labels: The right class of each.

        Returns:
            How many ids are unknown, as these answers are too old or not given.

        Raises:
            InputError: There are more or fewer labels than ids, or a label is negative.
        """
        numbers, values = torch.as_tensor(ids, dtype=torch.long), torch.as_tensor(labels, dtype=torch.long)
        if numbers.ndim != 1 or numbers.shape != values.shape:
            raise InputError(f"expected one label per id, got {tuple(values.shape)} for ids {tuple(numbers.shape)}")
        if len(values) and int(values.min()) < 0:
            raise InputError(f"labels must be class numbers from 0, got {int(values.min())}")
        oldest = max(0, self.num_answered - self.size)
        is_known = (numbers >= oldest) & (numbers < self.num_answered)
        rows = (numbers % self.size).to(self.classes.device)
        is_known &= (self.classes[rows] != UNKNOWN).cpu()
        self.labels[rows[is_known]] = values[is_known].to(self.labels)
        return int((~is_known).sum())

    def forget_labels_(self) -> None:
        """Forget all labels and estimates, as those of answers before a remedy say nothing about what follows."""
        self.labels.fill_(UNKNOWN)
        self.estimates.fill_(nan)

    @torch.inference_mode(False)
    def take_over_(self, state: Mapping[str, Tensor]) -> None:
        """Take over the last answers of another log, as many as this one has room for.

        Args:
            state: The ``state_dict()`` of the other log.

        Raises:
            ValueError: The tensors are not those of a log.
        """
        own = self.state_dict()
        size = state["classes"].numel()
        for name, value in state.items():
            expected = (size, *own[name].shape[1:]) if own[name].ndim else ()
            if tuple(value.shape) != expected or value.dtype != own[name].dtype:
                raise ValueError(f"{name} has the shape {tuple(value.shape)} and {value.dtype}, expected {expected}")
        number = int(state["count"])
        ids = torch.arange(max(0, number - min(size, self.size)), number)
        for name in ("classes", "source_classes", "labels", "estimates"):
            own[name][ids % self.size] = state[name][ids % size].to(own[name].device)
        self.count.fill_(number)

    def list_estimate_errors(self) -> tuple[Tensor, Tensor]:
        """Return by how much gains by labels differ from the estimates of their time, and these estimates.

        Both are of the answers that have a label and an estimate.
        """
        chosen = (self.labels != UNKNOWN) & self.estimates.isfinite()
        labels, estimates = self.labels[chosen], self.estimates[chosen]
        right, source_right = ((each[chosen] == labels).double() for each in (self.classes, self.source_classes))
        return right - source_right - estimates, estimates

    def summarize(self) -> FeedbackSummary:
        """Return what the labels say about the answers that are remembered."""
        labeled = self.labels != UNKNOWN
        number = int(labeled.sum())
        if number == 0:
            return FeedbackSummary(0)
        right = (self.classes == self.labels)[labeled]
        source_right = (self.source_classes == self.labels)[labeled]
        better, worse = int((right & ~source_right).sum()), int((~right & source_right).sum())
        # Agresti and Min (2005): one half is added to each of the four cells.
        center = (better - worse) / (number + 2)
        error = sqrt((better + worse + 1) - (better - worse) ** 2 / (number + 2)) / (number + 2)
        accuracy, source_accuracy = float(right.double().mean()), float(source_right.double().mean())
        ends = max(-1.0, center - Z_95 * error), min(1.0, center + Z_95 * error)
        return FeedbackSummary(number, accuracy, source_accuracy, accuracy - source_accuracy, *ends)


class AccuracyTracker(nn.Module):
    """Remember answers beside the source's, take labels for them, and correct the estimate without labels by them.

    A guard has one. A service that answers with more than one call of the guard has one of its own, around the guard's
    ``gain_monitor``.

    Args:
        answers: The answers; None to remember none.
        gain_monitor: The estimate without labels; None where there is no guard.
    """

    answers: AnswerLog | None
    gain_monitor: GainMonitor | None

    def __init__(self, answers: AnswerLog | None, gain_monitor: GainMonitor | None) -> None:
        super().__init__()
        self.answers, self.gain_monitor = answers, gain_monitor

    def add_(self, classes: Tensor, source_classes: Tensor, *, by_source: bool) -> range | None:
        """Remember answers, with the estimate of now unless the source gave them.

        Called after every batch, so that a correction by labels ends with the answers that it rests on, and while the
        stream is in another domain.

        Args:
            classes: The answered classes.
            source_classes: The source's.
            by_source: Whether the source gave the answers.

        Returns:
            The ids of the answers; None if none are remembered.
        """
        if self.answers is None:
            return None
        estimate = None if self.gain_monitor is None or by_source else self.gain_monitor.estimate_without_labels()
        ids = self.answers.add_(classes, source_classes, estimate)
        self._recalibrate_(self.answers)
        return ids

    def set_labels_(self, ids: Sequence[int] | Tensor, labels: Sequence[int] | Tensor) -> tuple[FeedbackSummary, int]:
        """Take labels for some of the answers.

        Args:
            ids: The ids of the answers.
            labels: The right class of each.

        Returns:
            What the labels say, and how many ids are unknown.

        Raises:
            ConfigError: No answers are remembered.
            InputError: There are more or fewer labels than ids, or a label is negative.
        """
        if self.answers is None:
            raise ConfigError(
                "the guard remembers no answers to take labels for: give a number, such as remember_answers=1000"
            )
        num_unknown = self.answers.set_labels_(ids, labels)
        self._recalibrate_(self.answers)
        return self.answers.summarize(), num_unknown

    def estimate(self) -> GainEstimate | None:
        """Return the gain as it is estimated now; None for too few images."""
        return None if self.gain_monitor is None else self.gain_monitor.estimate()

    def forget_(self) -> None:
        """Forget labels and signals, as those of answers before a remedy say nothing about what follows."""
        if self.answers is not None:
            self.answers.forget_labels_()
        if self.gain_monitor is not None:
            self.gain_monitor.forget_()

    def _recalibrate_(self, answers: AnswerLog) -> None:
        if self.gain_monitor is not None:
            self.gain_monitor.recalibrate_(*answers.list_estimate_errors())
