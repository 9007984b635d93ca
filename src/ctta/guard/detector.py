"""Collapse detection: a batch's answers against the source's on the same batch, and against their own history."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctta.guard.clumping import clumping
from ctta.guard.health import NUM_BINS, Answers, disagreement
from ctta.guard.thresholds import Thresholds

NUM_BATCHES = 12  # that are looked at for clumping
ENOUGH = 100  # elements of the recent past that an alarm needs: few that stray may be chance
ENOUGH_AT_ONCE = 32  # a single batch that has them may raise it by itself, at twice the limits
ENOUGH_FOR_CLUMPING = 8
ELEMENTS_OF_AN_IMAGE = 64  # pixels are many and alike: an image of them counts for no more
LARGEST_SCORE = 10.0
CALM = 0.5  # a score below is good health

STRAYING = "answers stray from the source's further than its doubt explains"
LOSING_CLASSES = "answers lose classes that the source sees"
SUDDEN = "answers stray from the source's much more than they used to"
NOT_FINITE = "answers are not finite"


@dataclass(frozen=True)
class Verdict:
    """What a batch says, with the history that it leads to."""

    collapse: float
    cause: str
    clumped: float
    is_good: bool  # in good health, and not merely unknown
    clumping: float | None
    anchor_disagreement: float
    recent: Tensor
    predictions: Tensor
    window: Tensor

    @property
    def score(self) -> float:
        return max(self.collapse, self.clumped)


class Detector(nn.Module):
    """Keeps a short history in buffers; :meth:`judge` is a pure function of it, and :meth:`remember` writes it."""

    recent: Tensor
    predictions: Tensor
    window: Tensor

    def __init__(self, thresholds: Thresholds) -> None:
        super().__init__()
        self.thresholds = thresholds
        # Decaying sums: elements, disagreements, doubt; and the usual disagreement, below 0 while unknown.
        self.register_buffer("recent", torch.tensor([0.0, 0.0, 0.0, -1.0]))
        self.register_buffer("predictions", torch.zeros(2, NUM_BINS))  # decaying sums of the answers' and the anchor's
        self.register_buffer("window", torch.full((NUM_BATCHES, NUM_BINS + 2), -1.0))  # below, last batch last

    @torch.no_grad()
    def judge(self, answers: Answers, anchor: Answers, source: Answers | None) -> Verdict:
        """Compare a batch's answers with the anchor's; and the source's batches among themselves, if it is given."""
        if not (answers.is_finite and anchor.is_finite):
            # Where the anchor's are not either, the input is to blame and not what was learnt.
            return self._without_history(LARGEST_SCORE if anchor.is_finite else 0.0)
        limits, per_batch = self.thresholds, answers.classes.shape[0]
        elements = float(min(answers.classes.numel(), per_batch * ELEMENTS_OF_AN_IMAGE))
        differ, doubt = disagreement(answers, anchor), 1 - anchor.confidence
        kept = math.exp(-elements / limits.memory)
        weight, differing, doubting, usual = self.recent.tolist()
        weight, differing, doubting = (
            kept * old + elements * new for old, new in ((weight, 1.0), (differing, differ), (doubting, doubt))
        )
        now = torch.stack([answers.mean_prediction, anchor.mean_prediction]).to(self.predictions)
        predictions = kept * self.predictions + elements * now
        recently = differing / weight
        scores = [(0.0, "")]
        if weight >= ENOUGH:
            scores += [
                (self._disagreeing(recently, doubting / weight), STRAYING),
                (self._losing_classes(predictions), LOSING_CLASSES),
            ]
        if weight >= ENOUGH and usual >= 0:
            scores.append(((recently - usual) / limits.shift, SUDDEN))
        if elements >= ENOUGH_AT_ONCE:
            scores += [
                (self._disagreeing(differ, doubt) / 2, STRAYING),
                (self._losing_classes(now) / 2, LOSING_CLASSES),
            ]
        collapse, cause = max(scores)
        if collapse < CALM and weight > limits.memory / 2:
            usual = recently if usual < 0 else usual + (recently - usual) * min(1.0, elements / (20 * limits.memory))
        window, clumps, clumped = self._batches_with(source, anchor)
        return Verdict(
            collapse=min(max(0.0, collapse), LARGEST_SCORE),
            cause=cause,
            clumped=clumped,
            is_good=weight >= ENOUGH and max(collapse, clumped) < CALM,
            clumping=clumps,
            anchor_disagreement=differ,
            recent=self.recent.new_tensor([weight, differing, doubting, usual]),
            predictions=predictions,
            window=window,
        )

    def _without_history(self, collapse: float) -> Verdict:
        return Verdict(collapse, NOT_FINITE, 0.0, False, None, 1.0, self.recent, self.predictions, self.window)

    def remember(self, verdict: Verdict) -> None:
        """Take a batch into the history."""
        for name in ("recent", "predictions", "window"):
            getattr(self, name).copy_(getattr(verdict, name))

    def forget_recent(self) -> None:
        """The answers of weights that are no longer there; what the source said of the batches stays."""
        self.recent[:3] = 0
        self.predictions.zero_()

    def _disagreeing(self, share: float, doubt: float) -> float:
        return share / (self.thresholds.margin + self.thresholds.doubt * doubt)

    def _losing_classes(self, predictions: Tensor) -> float:
        ours, anchors = _entropies(predictions)
        return (1 - ours / anchors) / self.thresholds.class_loss if anchors > 0.1 else 0.0

    def _batches_with(self, source: Answers | None, anchor: Answers) -> tuple[Tensor, float | None, float]:
        """The window with this batch, how much batches differ in their classes, and the score of that.

        A source that meets ever new domains also finds batches that differ. But there the batch's own statistics help,
        and the anchor is the surer of the two; a batch of one class they spoil, and the source is.
        """
        if source is None or source.agreement_within is None or len(source.classes) < ENOUGH_FOR_CLUMPING:
            return self.window, None, 0.0
        figures = [source.agreement_within, source.confidence - anchor.confidence]
        row = torch.cat([source.mean_prediction, source.mean_prediction.new_tensor(figures)])
        window = torch.cat([self.window[1:], row.to(self.window).unsqueeze(0)])
        filled = window[window[:, -2] >= 0]
        clumps = clumping(filled[:, :-2], filled[:, -2])
        if clumps is None:
            return window, None, 0.0
        surer = float(filled[:, -1].mean())
        score = min((clumps - 1) / self.thresholds.clumping, surer / self.thresholds.trust, LARGEST_SCORE)
        return window, clumps, max(0.0, score)


def _entropies(sums: Tensor) -> list[float]:
    shares = sums / sums.sum(1, keepdim=True).clamp_min(1e-12)
    entropies: list[float] = (-(shares * shares.clamp_min(1e-12).log()).sum(1)).tolist()
    return entropies
