"""What is known of accuracy: by a few delayed labels for the last answers, and by an estimate without any.

Labels arrive one by one, and an alarm that looks at a 95 % interval after each of them is false far more often than in
5 % of streams. Harm is therefore decided by a test that is valid at any time: a test martingale. A bet of a share of
the capital is made on each label, that the source is right and the method is not. If the method does not harm, the
capital does not grow on average, and by Ville's inequality it ever multiplies by 20 with a probability of at most 5 %.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log, nan, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ctta.core.state import CpuState
from ctta.core.validation import check_integer
from ctta.errors import ConfigError, InputError
from ctta.guard.estimate import GainEstimate, GainMonitor

UNKNOWN = -1
REJECTED = -2  # as a label: the answered class is wrong, and the right one is not known
_OF_EACH_ANSWER = ("classes", "source_classes", "labels", "labeled_at")
Z_95 = 1.96  # of a two-sided interval of 95 %
#: The probability of ever declaring harm, until a remedy, where there is none.
FALSE_ALARMS = 0.05
#: The shares of the capital that are bet, and the numbers of labels after which a new bet starts: harm that comes after
#: a long gain is found by a later start. The capital is split among them, the earlier starts get more.
BETS = torch.arange(1, 10, dtype=torch.float64) / 10
STARTS = torch.tensor([0, *(2**power for power in range(5, 24))])
MAX_EVIDENCE = 1e9


def compute_evidence(num_better: Tensor, num_worse: Tensor) -> Tensor:
    """Return the evidence of harm: the capital, from 1, of bets that a method is worse than the source.

    If each label finds on average, given those before it, that the method is not worse, this ever reaches 1/a with a
    probability of at most a.

    Args:
        num_better: By start (..., S): labels since then by which the method alone was right.
        num_worse: The same for the source alone.

    Returns:
        The evidence (...), at most ``MAX_EVIDENCE``.
    """
    better, worse = (each.double().unsqueeze(-1) for each in (num_better, num_worse))
    places = torch.arange(1, len(STARTS) + 1, dtype=torch.float64).unsqueeze(1)
    shares = (1 / (places * (places + 1))).log()
    capital = shares + better * torch.log1p(-BETS) + worse * torch.log1p(BETS)  # (..., S, bets)
    total = shares.logsumexp(0) + log(len(BETS))
    return (capital.flatten(-2).logsumexp(-1) - total).exp().clamp_max(MAX_EVIDENCE)


@dataclass(frozen=True)
class FeedbackSummary:
    """What labels, or verdicts, say about the last answers, adapted and not.

    The gain is unbiased, and the evidence valid, if it does not depend on whether answers are right which of them are
    labeled: for example every hundredth, and not only those that looked wrong. The interval is that of Agresti and Min
    for paired answers; it holds for one look, the evidence for a look after every label.

    Attributes:
        num_labels: Labels and verdicts among the answers that are remembered.
        accuracy: Fraction of right answers among the labeled ones; None without labels.
        source_accuracy: The same for the network without adaptation; None if a verdict leaves it open.
        gain: ``accuracy`` minus ``source_accuracy``; None likewise.
        low: Lower end of the 95 % interval of the gain; as if the source were right wherever that is open.
        high: Upper end; as if it were wrong there.
        evidence: How many times likelier harm has become, see :func:`compute_evidence`. It counts all labels since the
            last remedy, also those of answers that are no longer remembered.
        num_open: Answers that were called wrong, of which it is open whether the source's, another one, is right.
    """

    num_labels: int
    accuracy: float | None = None
    source_accuracy: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    evidence: float = 1.0
    num_open: int = 0

    @property
    def is_harmful(self) -> bool:
        """Whether adaptation harms by more than noise; false alarms are bounded however often one looks."""
        return self.evidence >= 1 / FALSE_ALARMS

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, and the verdict."""
        return asdict(self) | {"is_harmful": self.is_harmful}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return "no labels"
        if self.gain is None:
            low, high = 100 * self.low, 100 * self.high
            return (
                f"adapting: {low:+.1f} to {high:+.1f} points by {self.num_labels} labels, {self.num_open} of them open"
            )
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
    labeled_at: Tensor
    estimates: Tensor
    count: Tensor
    num_labeled: Tensor
    num_better: Tensor
    num_worse: Tensor

    def __init__(self, size: int, first_id: int = 0) -> None:
        super().__init__()
        self.size = check_integer("size", size, 1, 10**6)
        for name in _OF_EACH_ANSWER:
            self.register_buffer(name, torch.full((self.size,), UNKNOWN))
        # The gain, as it was estimated without labels at the time.
        self.register_buffer("estimates", torch.full((self.size,), nan, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(first_id))
        # Of the test for harm, since the last remedy: labels, and since each start those that tell the two apart.
        self.register_buffer("num_labeled", torch.tensor(0))
        self.register_buffer("num_better", torch.zeros(len(STARTS), dtype=torch.long))
        self.register_buffer("num_worse", torch.zeros(len(STARTS), dtype=torch.long))

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
        values = torch.as_tensor(labels, dtype=torch.long)
        if values.numel() and int(values.min()) < 0:
            raise InputError(f"labels must be class numbers from 0, got {int(values.min())}")
        return self._set_(ids, lambda _: values, values.shape)

    def set_verdicts_(self, ids: Sequence[int] | Tensor, right: Sequence[bool] | Tensor) -> int:
        """Remember which answers are right and which are wrong.

        That an answer is wrong says nothing about another answer of the source.

        Args:
            ids: The ids of the answers.
            right: Whether each is right.

        Returns:
            How many ids are unknown, as these answers are too old or not given.

        Raises:
            InputError: There are more or fewer verdicts than ids.
        """
        verdicts = torch.as_tensor(right, dtype=torch.bool)
        return self._set_(ids, lambda rows: torch.where(verdicts, self.classes[rows], REJECTED), verdicts.shape)

    def _set_(self, ids: Sequence[int] | Tensor, read_labels: Callable[[Tensor], Tensor], given: torch.Size) -> int:
        """Set the labels of answers, of the shape ``given``, from a function of their rows; see ``set_labels_``."""
        numbers = torch.as_tensor(ids, dtype=torch.long)
        if numbers.ndim != 1 or numbers.shape != given:
            raise InputError(f"expected one label per id, got {tuple(given)} for ids {tuple(numbers.shape)}")
        oldest = max(0, self.num_answered - self.size)
        is_known = (numbers >= oldest) & (numbers < self.num_answered)
        rows = (numbers % self.size).to(self.classes.device)
        is_known &= (self.classes[rows] != UNKNOWN).cpu()
        # Of two labels for one answer, the later one counts, at the place of the earlier one.
        latest = dict(zip(rows[is_known].tolist(), read_labels(rows)[is_known].tolist(), strict=True))
        self._label_(*torch.tensor([*latest.items()], dtype=torch.long).view(-1, 2).unbind(1))
        return int((~is_known).sum())

    @torch.inference_mode(False)
    def _label_(self, rows: Tensor, labels: Tensor) -> None:
        """Set the labels of some rows, and count them for the test."""
        is_new = self.labels[rows] == UNKNOWN
        self.labeled_at[rows[is_new]] = self.num_labeled + torch.arange(int(is_new.sum()))
        self.num_labeled += is_new.sum()
        before = self._compare(rows)
        self.labels[rows] = labels
        after = self._compare(rows)
        counts = (self.labeled_at[rows].unsqueeze(1) >= STARTS).long()
        self.num_better += ((after > 0).long() - (before > 0).long()) @ counts
        self.num_worse += ((after < 0).long() - (before < 0).long()) @ counts

    def _compare(self, rows: Tensor) -> Tensor:
        """Return 1 where by the label only the answer is right, -1 where only the source is, else 0.

        It is 0 also where a verdict leaves the source open: as if that were wrong, so that evidence is not invented.
        """
        right, source_right = (each[rows] == self.labels[rows] for each in (self.classes, self.source_classes))
        return (self.labels[rows] != UNKNOWN) * (right.long() - source_right.long())

    def forget_labels_(self) -> None:
        """Forget all labels and estimates, as those of answers before a remedy say nothing about what follows."""
        self.labels.fill_(UNKNOWN)
        self.labeled_at.fill_(UNKNOWN)
        self.estimates.fill_(nan)
        for count in (self.num_labeled, self.num_better, self.num_worse):
            count.zero_()

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
            expected = (size,) if name in (*_OF_EACH_ANSWER, "estimates") else tuple(own[name].shape)
            if tuple(value.shape) != expected or value.dtype != own[name].dtype:
                raise ValueError(f"{name} has the shape {tuple(value.shape)} and {value.dtype}, expected {expected}")
        number = int(state["count"])
        ids = torch.arange(max(0, number - min(size, self.size)), number)
        for name in (*_OF_EACH_ANSWER, "estimates"):
            own[name][ids % self.size] = state[name][ids % size].to(own[name].device)
        for name in ("count", "num_labeled", "num_better", "num_worse"):
            own[name].copy_(state[name])

    def list_estimate_errors(self) -> tuple[Tensor, Tensor]:
        """Return by how much gains by labels differ from the estimates of their time, and these estimates.

        Both are of the answers that have a label and an estimate; of none if a verdict leaves the source open, since
        the others would be a selection.
        """
        chosen = (self.labels != UNKNOWN) & self.estimates.isfinite() & ~self._is_open.any()
        labels, estimates = self.labels[chosen], self.estimates[chosen]
        right, source_right = ((each[chosen] == labels).double() for each in (self.classes, self.source_classes))
        return right - source_right - estimates, estimates

    @property
    def _is_open(self) -> Tensor:
        """Which answers were called wrong where the source has another one, which may be right."""
        return (self.labels == REJECTED) & (self.classes != self.source_classes)

    def summarize(self) -> FeedbackSummary:
        """Return what the labels say about the answers that are remembered."""
        labeled = self.labels != UNKNOWN
        number, evidence = int(labeled.sum()), float(compute_evidence(self.num_better, self.num_worse))
        if number == 0:
            return FeedbackSummary(0, evidence=evidence)
        right = (self.classes == self.labels)[labeled]
        source_right = (self.source_classes == self.labels)[labeled]
        better, worse = int((right & ~source_right).sum()), int((~right & source_right).sum())
        num_open = int(self._is_open.sum())
        ends = _find_ends(number, better, worse + num_open)[0], _find_ends(number, better, worse)[1]
        accuracy, source_accuracy = float(right.double().mean()), float(source_right.double().mean())
        if num_open:
            return FeedbackSummary(number, accuracy, None, None, *ends, evidence, num_open)
        return FeedbackSummary(number, accuracy, source_accuracy, accuracy - source_accuracy, *ends, evidence)


def _find_ends(number: int, better: int, worse: int) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the gain, from paired answers."""
    # Agresti and Min (2005): one half is added to each of the four cells.
    center = (better - worse) / (number + 2)
    error = sqrt((better + worse + 1) - (better - worse) ** 2 / (number + 2)) / (number + 2)
    return max(-1.0, center - Z_95 * error), min(1.0, center + Z_95 * error)


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

    def set_labels_(
        self,
        ids: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor | None = None,
        *,
        right: Sequence[bool] | Tensor | None = None,
    ) -> tuple[FeedbackSummary, int]:
        """Take labels for some of the answers, or whether they are right.

        Args:
            ids: The ids of the answers.
            labels: The right class of each.
            right: Whether each is right, in place of labels.

        Returns:
            What the labels say, and how many ids are unknown.

        Raises:
            ConfigError: No answers are remembered.
            InputError: There are more or fewer labels than ids, or a label is negative; or both or none are given.
        """
        if self.answers is None:
            raise ConfigError(
                "the guard remembers no answers to take labels for: give a number, such as remember_answers=1000"
            )
        if labels is not None and right is None:
            num_unknown = self.answers.set_labels_(ids, labels)
        elif right is not None and labels is None:
            num_unknown = self.answers.set_verdicts_(ids, right)
        else:
            raise InputError("expected either labels or right, which says whether each answer is right")
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
