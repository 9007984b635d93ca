"""Collapse detection: compare predictions with the source's on the same batch, and with their own history."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ctta.core.state import CpuState
from ctta.core.validation import check_each, check_positive
from ctta.guard.summary import NUM_BINS, PredictionSummary, disagreement

NUM_BATCHES = 12  # in the history of the class-sorting test
MIN_BATCHES = 4  # that the class-sorting test needs
MIN_BATCH_SIZE = 8  # that the class-sorting tests need
MAX_CHANCE = 1e-3  # probability that a batch of a shuffled stream has so few classes
MIN_ELEMENTS = 100  # of the recent past that an alarm needs, since few disagreements may be chance
MIN_ELEMENTS_OF_BATCH = 32  # with which a single batch may raise an alarm, at twice the limits
MAX_ELEMENTS_PER_IMAGE = 64  # neighboring pixels are alike, so that an image of them counts for no more
MAX_SCORE = 10.0
HEALTHY_SCORE = 0.5  # scores below are healthy
UNSURE_RATIO = 0.96  # of the method's usual confidence; statistics of few classes make it less sure than that
SURE_RATIO = 0.5  # of the method's usual doubt; one that collapses becomes surer than that
CONFIDENCE_RATE = 0.2  # of a batch in the usual confidence

DISAGREEMENT = "predictions differ from the source's more often than its uncertainty explains"
LOST_CLASSES = "predictions lose classes that the source predicts"
SUDDEN_CHANGE = "predictions differ from the source's much more often than before"
NOT_FINITE = "predictions are not finite"


@dataclass(frozen=True)
class CollapseThresholds:
    """Limits of the signals; a signal divided by its limit is a score, and an alarm is raised at a score of 1.

    The defaults were chosen by ``benchmarks/choose/guard_thresholds.py``, on images, corruptions and faults other than
    those of the published results.

    Attributes:
        margin: Fraction of elements that may differ from the anchor's (the source's weights under the same
            normalization statistics) in addition to what its uncertainty explains.
        doubt: How much of the anchor's uncertainty, one minus its confidence, may turn into disagreement.
        class_loss: How much lower the entropy of the mean prediction may be than the anchor's, relative to it.
        shift: How far disagreement may rise above its own history.
        class_sorting: How much likelier two elements of one batch may be to share a class than two of different
            batches, according to the source: 0.25 for a quarter likelier. Applies only where batch statistics are
            used, which class-sorted batches spoil.
        trust: How much higher the source's confidence may be than the anchor's, on average, in a sorted stream.
        few_classes: How much likelier two elements of a single batch may be to share a class than chance or the last
            batches explain, according to the source, as a fraction of the largest possible difference.
        memory: Number of elements of the recent past; short memories raise false alarms for small batches.
    """

    margin: float = 0.05
    doubt: float = 1.5
    class_loss: float = 0.1
    shift: float = 0.15
    class_sorting: float = 0.15
    trust: float = 0.02
    few_classes: float = 0.075
    memory: float = 250.0

    def __post_init__(self) -> None:
        check_each(check_positive, **vars(self))


@dataclass(frozen=True)
class Verdict:
    """The scores of a batch, and the history that includes it."""

    collapse: float
    cause: str
    sorting: float
    is_healthy: bool  # False also while there are too few elements to tell
    class_sorting: float | None
    recent: Tensor
    predictions: Tensor
    window: Tensor


class CollapseDetector(CpuState):
    """Judge batches against a short history in buffers, which :meth:`judge` reads and :meth:`remember_` writes."""

    recent: Tensor
    predictions: Tensor
    window: Tensor
    usual_confidence: Tensor

    def __init__(self, thresholds: CollapseThresholds) -> None:
        super().__init__()
        self.thresholds = thresholds
        # Decaying sums of elements, disagreements and uncertainty; then the usual disagreement, below 0 while unknown.
        self.register_buffer("recent", torch.tensor([0.0, 0.0, 0.0, -1.0]))
        self.register_buffer("predictions", torch.zeros(2, NUM_BINS))  # decaying sums of the method's and the anchor's
        # A row per batch, the last one last: the source's mean prediction, its agreement within the batch, and how much
        # more confident it is than the anchor.
        self.register_buffer("window", torch.full((NUM_BATCHES, NUM_BINS + 2), -1.0))
        self.register_buffer("usual_confidence", torch.tensor(-1.0))  # of the method; below 0 while unknown

    @torch.no_grad()
    def judge(
        self, predictions: PredictionSummary, anchor: PredictionSummary, source: PredictionSummary | None
    ) -> Verdict:
        """Compare the predictions of a batch with the anchor's, and the source's batches with each other.

        The anchor has the source's weights under the normalization statistics of the method. Without the source as it
        was trained, whether the stream is sorted is not tested.
        """
        if not (predictions.is_finite and anchor.is_finite):
            # If the anchor's are not finite either, the input is the cause and not the adaptation.
            collapse = MAX_SCORE if anchor.is_finite else 0.0
            return Verdict(collapse, NOT_FINITE, 0.0, False, None, self.recent, self.predictions, self.window)
        limits, batch_size = self.thresholds, predictions.classes.shape[0]
        elements = float(min(predictions.classes.numel(), batch_size * MAX_ELEMENTS_PER_IMAGE))
        differ, doubt = disagreement(predictions, anchor), 1 - anchor.confidence
        kept = math.exp(-elements / limits.memory)
        weight, differing, doubting, usual = self.recent.tolist()
        weight, differing, doubting = (
            kept * old + elements * new for old, new in ((weight, 1.0), (differing, differ), (doubting, doubt))
        )
        now = torch.stack([predictions.mean_prediction, anchor.mean_prediction]).to(self.predictions)
        sums = kept * self.predictions + elements * now
        recently = differing / weight
        scores = [(0.0, "")]
        if weight >= MIN_ELEMENTS:
            scores += [
                (self._score_disagreement(recently, doubting / weight), DISAGREEMENT),
                (self._score_lost_classes(sums), LOST_CLASSES),
            ]
        if weight >= MIN_ELEMENTS and usual >= 0:
            scores.append(((recently - usual) / limits.shift, SUDDEN_CHANGE))
        if elements >= MIN_ELEMENTS_OF_BATCH:
            scores += [
                (self._score_disagreement(differ, doubt) / 2, DISAGREEMENT),
                (self._score_lost_classes(now) / 2, LOST_CLASSES),
            ]
        collapse, cause = max(scores)
        if collapse < HEALTHY_SCORE and weight > limits.memory / 2:
            usual = recently if usual < 0 else usual + (recently - usual) * min(1.0, elements / (20 * limits.memory))
        window, class_sorting, sorting = self._judge_sorting(source, anchor)
        return Verdict(
            collapse=min(max(0.0, collapse), MAX_SCORE),
            cause=cause,
            sorting=sorting,
            is_healthy=weight >= MIN_ELEMENTS and max(collapse, sorting) < HEALTHY_SCORE,
            class_sorting=class_sorting,
            recent=self.recent.new_tensor([weight, differing, doubting, usual]),
            predictions=sums,
            window=window,
        )

    @torch.no_grad()
    def judge_batch(self, source: PredictionSummary, anchor: PredictionSummary) -> float:
        """Return the score of a single batch that has few classes; at 1 its batch statistics are useless.

        Under a corruption the source may also predict few classes. But there the batch's statistics help, and the
        anchor is more confident; in a batch of few classes the source is, by more than the standard error.
        """
        excess, chance = self.measure_concentration(source)
        if chance >= MAX_CHANCE or not anchor.is_finite:
            return 0.0
        lead, deviation = source.compare_confidences(anchor).values.tolist()
        trust: float = lead / (self.thresholds.trust + deviation / math.sqrt(source.confidences.numel()))
        return max(0.0, min(excess / self.thresholds.few_classes, trust, MAX_SCORE))

    @torch.no_grad()
    def measure_concentration(self, source: PredictionSummary) -> tuple[float, float]:
        """Return how concentrated a batch is on few classes, and the probability of that by chance.

        The first number is the source's agreement within the batch beyond that of a usual batch, as a fraction of the
        largest possible difference. Usual is what uniform classes give, or those of the last batches on which the
        source was not more confident than the anchor, whichever is more. The second is the p-value of Pearson's
        chi-squared test for uniform classes; it holds for any number of classes and any batch size.
        """
        num_elements, within = source.classes.numel(), source.agreement_within
        if not source.is_finite or within is None or num_elements < MIN_BATCH_SIZE or source.num_bins < 2:
            return 0.0, 1.0
        is_usual = (self.window[:, -2] >= 0) & (self.window[:, -1] < self.thresholds.trust)
        means = self.window[is_usual][:, :-2]
        earlier = float((means @ source.mean_prediction.to(means)).mean()) if len(means) else 0.0
        usual = max(1 / source.num_bins, min(earlier, 0.999))
        chi_squared = source.num_bins * (within * (num_elements - 1) + 1) - num_elements
        half = torch.tensor([(source.num_bins - 1) / 2, max(chi_squared, 0.0) / 2], dtype=torch.float64)
        return (within - usual) / (1 - usual), float(torch.special.gammaincc(half[0], half[1]))

    def is_unsure(self, predictions: PredictionSummary) -> bool:
        """Return whether the method is less confident than usual, or its usual confidence is unknown.

        Statistics of a batch of few classes lack what tells these classes apart, so that the method is unsure about it.
        This costs no pass of the source, which then tells few classes from a difficult batch.
        """
        usual = float(self.usual_confidence)
        return usual < 0 or not predictions.confidence >= UNSURE_RATIO * usual

    def is_sure(self, predictions: PredictionSummary) -> bool:
        """Return whether the method is much more confident than usual, as if it collapsed."""
        usual = float(self.usual_confidence)
        return usual >= 0 and 1 - predictions.confidence < SURE_RATIO * (1 - usual)

    def remember_confidence_(self, predictions: PredictionSummary) -> None:
        """Add a batch of a shuffled stream to the usual confidence."""
        usual = float(self.usual_confidence)
        if predictions.is_finite:
            new = predictions.confidence
            self.usual_confidence.fill_(new if usual < 0 else usual + CONFIDENCE_RATE * (new - usual))

    def remember_(self, verdict: Verdict) -> None:
        """Add a judged batch to the history."""
        for name in ("recent", "predictions", "window"):
            getattr(self, name).copy_(getattr(verdict, name))

    def forget_predictions_(self) -> None:
        """Forget the predictions of weights that were replaced; the source's history stays."""
        self.recent[:3] = 0
        self.predictions.zero_()
        self.usual_confidence.fill_(-1.0)

    def _score_disagreement(self, fraction: float, doubt: float) -> float:
        return fraction / (self.thresholds.margin + self.thresholds.doubt * doubt)

    def _score_lost_classes(self, predictions: Tensor) -> float:
        probabilities = predictions / predictions.sum(1, keepdim=True).clamp_min(1e-12)
        entropy, anchor_entropy = (-(probabilities * probabilities.clamp_min(1e-12).log()).sum(1)).tolist()
        return (1 - entropy / anchor_entropy) / self.thresholds.class_loss if anchor_entropy > 0.1 else 0.0

    def _judge_sorting(
        self, source: PredictionSummary | None, anchor: PredictionSummary
    ) -> tuple[Tensor, float | None, float]:
        """Return the window with this batch, its :func:`class_sorting_ratio`, and the score of that.

        Batches also differ in a stream of ever new domains. But there the batch's own statistics help, and the anchor
        is more confident than the source; class-sorted batches spoil them, and the source is.
        """
        if source is None or source.agreement_within is None or len(source.classes) < MIN_BATCH_SIZE:
            return self.window, None, 0.0
        values = [source.agreement_within, source.confidence - anchor.confidence]
        row = torch.cat([source.mean_prediction, source.mean_prediction.new_tensor(values)])
        window = torch.cat([self.window[1:], row.to(self.window).unsqueeze(0)])
        filled = window[window[:, -2] >= 0]
        ratio = class_sorting_ratio(filled[:, :-2], filled[:, -2])
        if ratio is None:
            return window, None, 0.0
        trust = float(filled[:, -1].mean())
        score = min((ratio - 1) / self.thresholds.class_sorting, trust / self.thresholds.trust, MAX_SCORE)
        return window, ratio, max(0.0, score)


@torch.no_grad()
def class_sorting_ratio(means: Tensor, within: Tensor) -> float | None:
    """Return how much likelier two elements of one batch share a class than two of different batches; about 1 if not.

    Both probabilities are unbiased for any number of classes and any batch size, so that their ratio needs no table of
    critical values. A new domain changes the source's predictions too, so the batches are split in two where that
    lowers the ratio most, and only batches on the same side are compared. There is no ratio of too few batches.

    Args:
        means: Mean predictions of the last batches, one row each.
        within: For each batch, the probability that two of its elements share a class.
    """
    count = len(means)
    if count < MIN_BATCHES:
        return None
    similarity = (means @ means.T).fill_diagonal_(0).tolist()
    inside = within.tolist()
    ratios: list[float] = []
    for cut in range(count):
        sides = [range(cut), range(cut, count)]
        pairs = [(rows, len(rows) * (len(rows) - 1)) for rows in sides if len(rows) > 1]
        own = sum(inside[row] for rows, _ in pairs for row in rows)
        other = sum(
            len(rows) / num_pairs * sum(similarity[row][column] for row in rows for column in rows)
            for rows, num_pairs in pairs
        )
        ratios.append(own / max(other, 1e-12))
    return min(ratios)
