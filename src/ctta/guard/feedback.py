"""What a guard knows of accuracy: by a few delayed labels for its last answers, and by an estimate without any."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from ctta.errors import ConfigError
from ctta.guard.answers import AnswerLog, FeedbackSummary
from ctta.guard.diagnostics import source_as_trained
from ctta.guard.estimate import GainEstimate, GainMonitor
from ctta.guard.events import EventKind
from ctta.guard.recovery import GuardRemedies
from ctta.guard.remedies import Remedy


class GuardFeedback(GuardRemedies):
    """The part of a guard that remembers answers, takes labels for them, and estimates accuracy without labels."""

    answers: AnswerLog | None
    gain_monitor: GainMonitor | None
    on_harm: Literal["reset", "freeze"] | None
    last_ids: range | None
    _source_logits: Tensor | None  # within a step only

    def feedback(self, ids: Sequence[int] | Tensor, labels: Sequence[int] | Tensor) -> FeedbackSummary:
        """Take labels for some of the last answers, and tell by them whether adaptation helps.

        Nothing is trained on the labels. If they show harm by more than noise, ``on_harm`` is applied. With an
        ``estimator``, estimates without labels are corrected by what the labels show, as long as the answers are
        remembered and the stream looks as it did then.

        Args:
            ids: Ids of the answers: :attr:`last_ids` after each call has one for each input. Those that are not
                remembered any more are ignored.
            labels: The right class of each.

        Returns:
            The accuracy of the labeled answers, that of the source, and their difference with an interval.

        Raises:
            ConfigError: The guard remembers no answers.
            InputError: There are more or fewer labels than ids, or a label is negative.
        """
        if self.answers is None:
            raise ConfigError("the guard remembers no answers to take labels for: give remember_answers=1000, say")
        self.answers.set_labels_(ids, labels)
        self.recalibrate_estimate(self.answers)
        summary = self.answers.summarize()
        if summary.is_harmful:
            cause = f"{summary}"
            if self.on_harm is None:
                self.record(EventKind.HARM, cause)
            else:
                self._apply_remedy(self.on_harm, cause, EventKind.HARM)
        return summary

    @override
    def _apply_remedy(self, remedy: Remedy, cause: str, kind: EventKind | None = None) -> None:
        super()._apply_remedy(remedy, cause, kind)
        # The labels and signals of answers before it say nothing about what follows.
        if self.answers is not None:
            self.answers.forget_labels_()
        if self.gain_monitor is not None:
            self.gain_monitor.forget_()

    def estimate_without_labels(self) -> GainEstimate | None:
        """Return the accuracies as they are estimated before any label corrects them, to compare answers with them.

        Returns:
            The estimate; None if there is none, or if the source gave the last answers, which it is not about.
        """
        if self.gain_monitor is None or self.health.answered_by_source:
            return None
        return self.gain_monitor.estimate_without_labels()

    def recalibrate_estimate(self, answers: AnswerLog) -> None:
        """Correct estimates without labels by the labels of answers that are remembered; nothing without an estimator.

        Called after every batch, so that a correction ends with the answers that it rests on, and while the stream is
        in another domain.

        Args:
            answers: Answers that have their estimates, and some of them labels.
        """
        if self.gain_monitor is not None:
            self.gain_monitor.recalibrate_(answers.find_estimate_errors(self.gain_monitor.compare_domains))

    def _remember_answers(self, x: Tensor, logits: Tensor) -> None:
        """Remember the answers to a batch beside the source's, if they are asked for."""
        source_logits, self._source_logits = self._source_logits, None
        if self.answers is None or logits.ndim != 2:
            return
        if source_logits is None or len(source_logits) != len(x):  # some inputs were not valid
            with torch.no_grad():
                source_logits = source_as_trained(self.source)(x)
        estimate = self.estimate_without_labels()
        self.last_ids = self.answers.add_(logits.argmax(1), source_logits.argmax(1), estimate)
        self.recalibrate_estimate(self.answers)

    def _estimate_gain(self) -> GainEstimate | None:
        return None if self.gain_monitor is None else self.gain_monitor.estimate()

    def _check_gain(self) -> None:
        """Apply ``on_harm`` if the estimate shows harm by more than its uncertainty."""
        found = self._estimate_gain()
        if found is not None and found.is_harmful and self.on_harm is not None:
            self._apply_remedy(self.on_harm, str(found), EventKind.HARM)
