"""The guard around a method."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import SingleProcess, change_call, check_flag, read_flags
from ctta.core.state import match_dtypes_
from ctta.core.transaction import restore_on_error
from ctta.core.validation import check_choice, check_integer
from ctta.errors import CheckpointError, ConfigError
from ctta.functional import widest_float
from ctta.guard.answers import AccuracyTracker, AnswerLog, FeedbackSummary
from ctta.guard.detector import CollapseDetector, CollapseThresholds
from ctta.guard.diagnostics import (
    Baseline,
    Diagnostics,
    StepRecord,
    diagnose,
    evaluate_baseline,
    pair_with_source,
    record_step,
    relative_norm,
    reuse_source_pass,
    source_as_trained,
    suspect_few_classes,
)
from ctta.guard.estimate import GainMonitor, count_inputs
from ctta.guard.health import Event, EventKind, Health, append_to_audit_log
from ctta.guard.recovery import REMEDIES, Reaction, Schedule, take_snapshot
from ctta.guard.summary import PredictionSummary, Reading, Readout, summarize
from ctta.guard.validator import InputSpec, InputValidator, InvalidValuesError
from ctta.nn import batch_fraction, has_batch_norm

_LEARNED_SPEC, _DEFAULT_THRESHOLDS = InputSpec(), CollapseThresholds()
#: Images of a full step on networks without BatchNorm. With full steps, batches of 4 moved weights so far that methods
#: had lost up to 34 points before anything showed it (``benchmarks/results/guard_matrix.py``).
FULL_BATCH_SIZE = 64
_SHADOW_REPORT_EVERY = 100  # batches
_MAX_EVENTS = 100  # kept in memory


class _Repeat(Exception):
    """Raised to undo a step and take it again, knowing more about the batch; nobody outside sees it.

    Args:
        **known: Arguments of :meth:`Guarded._adapt`.
    """

    def __init__(self, **known: bool) -> None:
        super().__init__()
        self.known = known


class _BadRowsFound(Exception):
    """Raised to undo a step on a batch of which some inputs are not valid; nobody outside sees it.

    Args:
        valid: A mask of the others.
    """

    def __init__(self, valid: Tensor) -> None:
        super().__init__()
        self.valid = valid


class Guarded(AdaptiveModel):
    """A method with input validation, health signals, collapse detection, remedies and an event log.

    It is itself an :class:`~ctta.AdaptiveModel`. While the stream is healthy, the wrapped method predicts and adapts as
    it would alone, but for the steps of small batches. An alarm is raised if its predictions differ from the source's
    more often than the source's own uncertainty explains, or lose classes that the source still predicts. Then the
    source's weights predict that batch, ``on_collapse`` is applied to the method, and it pauses for a while, longer
    after each relapse. If batches arrive sorted by class, batch statistics are useless: until that ends, the source
    predicts with its running statistics, and nothing is adapted. The same happens to a single batch with few classes,
    also to the first one.

    On networks without BatchNorm that label images, a batch of n < 64 images takes (n/64)² of a step: nothing else
    holds small batches back there, and a method is lost before a hundred images have shown it.

    Args:
        model: The method; it becomes part of the guard, so use only the guard from now on.
        input_spec: Requirements on inputs; by default learned from the first batch.
        bad_rows: What to do with inputs that are not finite or out of range: ``"refuse"`` the batch, or let the
            ``"source"`` predict them and treat the others as if they had come alone.
        on_collapse: ``"rollback"`` to the last good snapshot, ``"reset"`` to the source, ``"soft_reset"`` (nine tenths
            of the way), ``"freeze"`` (roll back and stop adapting), or None to only report.
        reset_every: Reset the method and the snapshot after every n batches, learned from or not, whatever the health,
            and log an event (RDumb: 1000); None for never. The policy :class:`~ctta.policies.ResetEvery` is for methods
            without a guard: it counts the batches that were learned from, or images. Use one of the two.
        adapt_every: Adapt to every n-th batch only, and predict the others by one pass of the adapted network, without
            averaging views or whatever else the method does.
        max_update: Largest norm of an optimizer step relative to the norm of the trained parameters in the source;
            larger steps are scaled down. None for no limit.
        shadow: Whether to adapt but answer with the source; ``health`` and the audit log tell what would differ.
        thresholds: When to raise an alarm.
        inspect_every: Inspect every n-th batch while the stream is healthy, and also when the method becomes much more
            or less confident; otherwise every batch is inspected.
        snapshot_every: Batches to adapt to between two snapshots, which are taken of healthy states only.
        cooldown: Batches without adaptation after an alarm.
        remember_answers: Number of last answers to remember, each with that of the source, for :meth:`feedback`; 0 for
            none. The source then answers every batch, which costs a pass.
        on_harm: What to do when labels, or the estimate, show that adaptation harms by more than noise: ``"reset"`` to
            the source, or ``"freeze"`` (roll back and stop adapting). With None, harm that labels show is only
            reported, and harm that the estimate shows is treated as ``on_collapse`` says.
        audit: File that gets a line of JSON per event. It is not saved with the stream, and forks do not get it.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> from ctta.methods import Tent
    >>> model = Guarded(Tent(net), bad_rows="source")
    >>> logits = model(torch.rand(16, 3, 8, 8))    # predicts and adapts
    >>> model.collapse_score
    0.0
    """

    checks_values_late = True
    supports_data_parallel = False  # it decides by local rows, on which ranks would disagree
    wrapped: AdaptiveModel
    last_good: AdaptiveModel  # a snapshot, which shares the source with the wrapped model and the guard
    health: Health
    audit: str | None  # file that events are written to; it can be set
    #: Ids of the last answers, one for each input; None if none are remembered.
    last_ids: range | None
    num_compared: int  # in shadow mode
    num_differing: int

    def __init__(
        self,
        model: AdaptiveModel,
        *,
        input_spec: InputSpec = _LEARNED_SPEC,
        bad_rows: Literal["refuse", "source"] = "refuse",
        on_collapse: str | None = "rollback",
        reset_every: int | None = None,
        adapt_every: int = 1,
        max_update: float | None = None,
        shadow: bool = False,
        thresholds: CollapseThresholds = _DEFAULT_THRESHOLDS,
        inspect_every: int = 8,
        snapshot_every: int = 10,
        cooldown: int = 10,
        remember_answers: int = 0,
        on_harm: Literal["reset", "freeze"] | None = None,
        audit: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(input_spec, InputSpec) or not isinstance(thresholds, CollapseThresholds):
            raise TypeError(
                f"expected input_spec=ctta.guard.InputSpec(...) and thresholds=ctta.guard.CollapseThresholds(...), got "
                f"{input_spec!r} and {thresholds!r}"
            )
        check_choice("bad_rows", bad_rows, ("refuse", "source"))
        if on_collapse is not None:
            check_choice("on_collapse", on_collapse, tuple(REMEDIES))
        if on_harm is not None:
            check_choice("on_harm", on_harm, ("reset", "freeze"))
        check_integer("remember_answers", remember_answers, 0)
        if reset_every is not None:
            check_integer("reset_every", reset_every, 1)
        if max_update is not None and not max_update > 0:
            raise ConfigError(f"max_update must be above 0, or None for no limit, got {max_update!r}")
        if not isinstance(model, AdaptiveModel) or model.wrapped is not None:
            raise TypeError(f"expected a method to guard, such as ctta.CoTTA(net), got {type(model).__name__}")
        if model.answers_logits is not self.answers_logits:
            right = "Guarded" if model.answers_logits else "boxes.GuardedDetector"
            raise ConfigError(f"{type(self).__name__} does not guard {type(model).__name__}: use ctta.guard.{right}")
        super().__init__(model, batch_stats=model.batch_stats, seed=model.seed, output=model.output, amp=model.amp)
        self.input_spec, self.bad_rows, self.on_collapse, self.on_harm = input_spec, bad_rows, on_collapse, on_harm
        self.reset_every, self.adapt_every, self.max_update, self.shadow = reset_every, adapt_every, max_update, shadow
        self.thresholds, self.inspect_every, self.snapshot_every = thresholds, inspect_every, snapshot_every
        self.cooldown, self.remember_answers = cooldown, remember_answers
        self.frozen, model.frozen = model.frozen, False  # the guard decides when to adapt
        self.wrapped, self.last_good = model, take_snapshot(model)
        self.validator = InputValidator(input_spec)
        self.detector = CollapseDetector(thresholds)
        self.schedule = Schedule(adapt_every, inspect_every, snapshot_every, cooldown, on_collapse)
        self.accuracy = AccuracyTracker(
            AnswerLog(remember_answers) if remember_answers else None,
            GainMonitor(count_inputs(model.source)),
        )
        self.health, self.last_ids = Health(step=0), None
        # Whether the number of images decides on steps; None while unknown. Not a state: it follows from the network.
        self._scales_steps = False if has_batch_norm(model.source) or not self.answers_logits else None
        self.audit = None if audit is None else os.fspath(audit)
        self._events: tuple[Event, ...] = ()  # replaced, and not changed: a failed step is undone with its events
        self._answers: tuple[Tensor, Tensor] | None = None  # within a step only, and the source's
        self.register_counter("num_compared")
        self.register_counter("num_differing")

    @override
    @property
    def _fixed_networks(self) -> list[nn.Module]:
        return [self.source, source_as_trained(self.source)]

    def _take_source(self, net: nn.Module) -> tuple[nn.Module, set[str]]:
        assert isinstance(net, AdaptiveModel), "the constructor has checked it"
        if type(net.coordinator) is not SingleProcess:
            raise ConfigError(
                "a guard decides by its local rows, so ranks that share a stream would disagree: guard a model on one "
                "process, or share it without a guard"
            )
        return net.source, net._trainable

    # ---- step ----

    @override
    def check_input(self, x: Tensor) -> None:
        try:
            self.validator.check(x, check_values=self.bad_rows == "refuse")
        except (TypeError, ValueError) as error:
            self.record(EventKind.REFUSAL, str(error))
            raise

    @override
    def _run(self, step: Callable[[Tensor], Tensor], x: Tensor, *, changes: bool = False) -> Tensor:
        try:
            return super()._run(step, x, changes=changes)
        except InvalidValuesError as error:  # here, since what is recorded within a step is undone with it
            self.record(EventKind.REFUSAL, str(error))
            raise

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        # The source, a remedy or the audit log may fail after the method has learned; the batch must then not count, or
        # a retry would learn twice.
        learns = self.schedule.should_adapt(self.num_steps, few_classes=0.0)
        with restore_on_error(self, learns=learns) as undo:
            events, valid, known = self._events, None, {"inspect": False, "adapt": True}
            while True:
                try:
                    return self._adapt_and_remember(x, valid, **known)
                except _Repeat as repeat:
                    known |= repeat.known
                    undo()
                    self._events = events
                except _BadRowsFound as found:
                    valid = found.valid
                    undo()
                    bad = f"{int((~valid).sum())} of {len(x)} inputs, not finite or out of range,"
                    self.record(EventKind.BAD_ROWS, f"{bad} are predicted by the source")
                    events = self._events

    def _adapt_and_remember(self, x: Tensor, valid: Tensor | None, *, inspect: bool, adapt: bool) -> Tensor:
        self.last_step = None
        logits = self._predict_rows(x, valid, partial(self._adapt, inspect=inspect, adapt=adapt))
        self._remember_answers(x, logits)
        if self.reset_every is not None and (self.num_steps + 1) % self.reset_every == 0:
            self._apply_remedy("reset", f"every {self.reset_every} batches", EventKind.PERIODIC_RESET)
        return logits

    def _remember_answers(self, x: Tensor, logits: Tensor) -> None:
        """Remember the answers to a batch beside the source's, if they are asked for."""
        answers, self._answers = self._answers, None
        if self.accuracy.answers is None or logits.ndim != 2:
            return
        if answers is None or len(answers[0]) != len(x):  # some inputs were not valid
            with torch.no_grad():
                source_logits = source_as_trained(self.source)(x)
            answers = logits.argmax(1), source_logits.argmax(1)
        self.last_ids = self.accuracy.add_(*answers, by_source=self.health.answered_by_source)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._replace_bad_rows(x, self._predict)

    @override
    def _forward_once(self, x: Tensor) -> Tensor:
        return self._replace_bad_rows(x, partial(AdaptiveModel.predict_once, self.wrapped))

    def _replace_bad_rows(self, x: Tensor, predict: Callable[[Tensor], Tensor]) -> Tensor:
        try:
            return self._predict_rows(x, None, predict)
        except _BadRowsFound as found:
            return self._predict_rows(x, found.valid, predict)

    def _predict_rows(self, x: Tensor, valid: Tensor | None, predict: Callable[[Tensor], Tensor]) -> Tensor:
        """Predict the valid inputs as if they had come alone, and the others by the source as it was trained.

        Without a mask all inputs are valid, or the first read of the wrapped model raises :class:`_BadRowsFound`.
        """
        if valid is None:
            if self.bad_rows == "source":
                rows = self.validator.valid_rows(x)
                check_flag(rows.all(), lambda: _BadRowsFound(rows))
            try:
                return predict(x)
            except (RuntimeError, ValueError):
                read_flags()  # what fails may be what a bad row leads to
                raise
        logits: Tensor = source_as_trained(self.source)(x)
        if valid.any():
            with change_call(num_images=int(valid.sum())):  # the other rows have no part in batch statistics
                logits[valid] = predict(x[valid]).to(logits.dtype)
        return logits

    def _predict(self, x: Tensor) -> Tensor:
        readout = Readout()
        baseline = self._evaluate_baseline(x, readout)
        with self._scale_steps(x, baseline), reuse_source_pass(self.source, x, baseline):
            logits = self._predict_wrapped(x)
        predictions = summarize(self.wrapped.judged_logits(logits, x), readout)
        diagnostics = diagnose(self.wrapped, x, predictions, baseline, self.detector)
        if suspect_few_classes(self.source, x, diagnostics, self.detector):
            baseline = self._evaluate_baseline(x, readout, inspect=True)
            diagnostics = diagnose(self.wrapped, x, predictions, baseline, self.detector)
        return self._select_logits(logits, diagnostics)

    def _adapt(self, x: Tensor, *, inspect: bool, adapt: bool) -> Tensor:
        readout = Readout()
        baseline = self._evaluate_baseline(x, readout, inspect=inspect)
        inspect = baseline.is_inspected
        adapt = adapt and self.schedule.should_adapt(self.num_steps, few_classes=0.0)  # as far as it is known yet
        # Before the step, since the predictions show the health of these weights, and not of the updated ones.
        candidate = take_snapshot(self.wrapped) if adapt and inspect and self.schedule.should_snapshot() else None
        with (
            self._scale_steps(x, baseline),
            record_step(self.wrapped, x, self.max_update, inspect=inspect) as step,
            reuse_source_pass(self.source, x, baseline),
        ):
            # Of the base, which returns what a step does and not what callers get.
            logits = AdaptiveModel.adapt(self.wrapped, x) if adapt else self._predict_wrapped(x)
        predictions = summarize(self.wrapped.judged_logits(logits, x), readout)
        measured = self._measure_step(predictions, step)
        if inspect:
            measured |= self._measure_distance(readout)
        if self.accuracy.answers is not None:
            for summary in (predictions, baseline.source, baseline.anchor):
                if summary is not None:
                    summary.read_classes()
        # All of it is read here, at once. An accelerator stalls at each read, so the step was taken before.
        diagnostics = diagnose(self.wrapped, x, predictions, baseline, self.detector)
        if suspect_few_classes(self.source, x, diagnostics, self.detector):
            raise _Repeat(inspect=True)
        if adapt and inspect and not self.schedule.should_adapt(self.num_steps, diagnostics.few_classes):
            raise _Repeat(adapt=False)  # since nothing is to be learned from a batch of few classes
        self._estimate_(diagnostics)
        harm = self._react_to_estimate_(diagnostics)
        self.validator.learn_(x)
        self.last_step = self.wrapped.last_step if adapt else None
        selected = self._select_logits(logits, diagnostics)
        self._answers = self._list_answers(selected, logits, diagnostics)
        if diagnostics.verdict is not None and not inspect:
            measured |= self._measure_distance(readout)
        adapt = adapt and not self.is_skipping  # as a policy may have decided
        self.health = self._measure_health(diagnostics, measured, adapted=adapt, by_source=selected is not logits)
        found = self.accuracy.estimate()
        gains = found is None or found.gain >= 0  # however uncertain: a method that decays slowly never looks ill
        is_good = candidate is not None and diagnostics.verdict is not None and diagnostics.verdict.is_healthy and gains
        if candidate is not None and is_good:
            self.last_good = candidate
        self.schedule.count_batch_(adapted=adapt, score=diagnostics.score, snapshot=is_good)
        # A single image that the method is sure of says nothing, and an inspection takes as long as a step.
        if diagnostics.verdict is None and len(x) > 1 and self.detector.is_sure(diagnostics.predictions):
            self.schedule.inspect_next_()
        if self.last_step is not None and self.last_step.skipped:
            self.num_skipped += 1
            self.record(EventKind.SKIPPED, "the loss or a gradient was not finite")
        if self.shadow:
            self._count_differences(diagnostics)
        if diagnostics.few_classes < 1 and not self.schedule.is_sorted:
            self.detector.remember_confidence_(diagnostics.predictions)
        if diagnostics.verdict is not None:
            self.detector.remember_(diagnostics.verdict)
        for reaction in (harm, self.schedule.react_(diagnostics)):
            if reaction is not None:
                self._apply_remedy(reaction.remedy, reaction.cause, reaction.kind)
        return selected

    @contextmanager
    def _scale_steps(self, x: Tensor, baseline: Baseline) -> Iterator[None]:
        """Let few images take small steps on a network without BatchNorm, unless it labels pixels."""
        if self._scales_steps is None:
            with torch.no_grad():
                known = baseline.source_logits
                self._scales_steps = (source_as_trained(self.source)(x[:1]) if known is None else known).ndim == 2
        with change_call(full_batch_size=FULL_BATCH_SIZE if self._scales_steps else None):
            yield

    def _predict_wrapped(self, x: Tensor) -> Tensor:
        """Predict without an update; between two updates of ``adapt_every`` by one pass, which is what it is for."""
        is_between = self.num_steps % self.adapt_every != 0
        return (AdaptiveModel.predict_once if is_between else AdaptiveModel.predict)(self.wrapped, x)

    def _estimate_(self, found: Diagnostics) -> None:
        """Take an inspected batch into the estimate of gain."""
        monitor, source, inputs = self.accuracy.gain_monitor, found.baseline.source, found.baseline.inputs
        if monitor is None or source is None or inputs is None or found.predictions.classes.ndim > 1:
            return
        if found.predictions.is_finite and source.is_finite:
            answers, number = found.predictions.compare_answers(source), len(found.predictions.classes)
            monitor.add_(answers.values, inputs.values, number, self.num_steps, found.predictions.num_bins)

    def _react_to_estimate_(self, diagnostics: Diagnostics) -> Reaction | None:
        """Let the source answer while the method harms, as far as it shows without labels."""
        monitor = self.accuracy.gain_monitor
        if monitor is None or diagnostics.verdict is None:
            return None
        has_alarm = self.schedule.is_sorted or (diagnostics.score or 0.0) >= 1  # with a remedy of its own
        # The remedy does not lead such a method to the source, so doubt alone is no reason for it.
        is_cautious = not diagnostics.baseline.has_own_anchor
        return self.schedule.react_to_estimate_(
            monitor.list_estimates(), is_cautious=is_cautious, ignore_harm=has_alarm, on_harm=self.on_harm
        )

    def _evaluate_baseline(self, x: Tensor, readout: Readout, *, inspect: bool = False) -> Baseline:
        inspect = inspect or self.schedule.should_inspect(self.num_steps)
        if (
            inspect
            or self.shadow
            or self.schedule.is_sorted
            or self.schedule.is_standby
            or self.accuracy.answers is not None
        ):
            return evaluate_baseline(self.wrapped, x, readout, inspect=inspect)
        return Baseline()

    def _select_logits(self, logits: Tensor, diagnostics: Diagnostics) -> Tensor:
        """Return the method's logits, or the source's where those cannot be trusted."""
        selected: Tensor | None = logits
        if self.shadow:
            selected = diagnostics.baseline.source_logits
        elif self.on_collapse is None:
            return logits
        elif self.schedule.is_standby or self.schedule.judge_sorted(diagnostics) or diagnostics.few_classes >= 1:
            selected = diagnostics.baseline.source_logits
        elif diagnostics.verdict is not None and diagnostics.verdict.collapse >= 1:
            selected = diagnostics.baseline.anchor_logits
        assert selected is not None, "the source was evaluated"
        return selected

    def _list_answers(self, selected: Tensor, logits: Tensor, found: Diagnostics) -> tuple[Tensor, Tensor] | None:
        """Return the classes that are answered, and the source's, if they are remembered."""
        source, anchor = found.baseline.source, found.baseline.anchor
        if self.accuracy.answers is None or source is None:
            return None
        by_source = selected is found.baseline.source_logits
        chosen = found.predictions if selected is logits else source if by_source or anchor is None else anchor
        return chosen.read_classes().values.long(), source.read_classes().values.long()

    def _measure_step(self, predictions: PredictionSummary, step: StepRecord) -> dict[str, Reading]:
        found: dict[str, Tensor] = {}
        if step.update_norm is not None:
            found["update_norm"] = step.update_norm * self.wrapped.step_scale
        if (student := step.student_classes) is not None:
            differs = student != predictions.classes
            found["student_disagreement"] = differs.to(widest_float(differs.device)).mean()
        return {name: predictions.readout.add(value) for name, value in found.items()}

    @torch.no_grad()
    def _measure_distance(self, readout: Readout) -> dict[str, Reading]:
        pairs = pair_with_source(self.wrapped, trained_only=True)
        if not pairs:
            return {}
        norm = relative_norm([new - original for new, original in pairs], [original for _, original in pairs])
        return {"distance_to_source": readout.add(norm)}

    def _measure_health(
        self, found: Diagnostics, measured: dict[str, Reading], *, adapted: bool, by_source: bool
    ) -> Health:
        signals: dict[str, Any] = found.signals() | {name: float(value) for name, value in measured.items()}
        if (estimate := self.accuracy.estimate()) is not None:
            signals |= estimate.as_signals()
        health = Health(
            step=self.num_steps,
            **signals,
            batch_stats=batch_fraction(self.source, len(found.predictions.classes)),
            skipped=self.last_step.skipped if self.last_step else None,
            adapted=adapted,
            answered_by_source=by_source,
            collapse_score=self.health.collapse_score if found.score is None else found.score,
        )
        is_same = health.is_healthy == self.health.is_healthy
        return replace(health, state_since=self.health.state_since if is_same else self.num_steps)

    def _count_differences(self, diagnostics: Diagnostics) -> None:
        """Count the predictions that differ from the source's, and report them regularly."""
        source = diagnostics.baseline.source
        assert source is not None, "the source was evaluated"
        self.num_compared += diagnostics.predictions.classes.numel()
        self.num_differing += int(float(diagnostics.predictions.count_differences(source)))
        if (self.num_steps + 1) % _SHADOW_REPORT_EVERY == 0:
            self.record(EventKind.SHADOW, f"{self.num_differing} of {self.num_compared} predictions would differ")

    def _apply_remedy(self, remedy: str | None, cause: str, kind: EventKind) -> None:
        """Apply a remedy, or none, and record what it was for."""
        if remedy is not None:
            self.wrapped = REMEDIES[remedy](self.wrapped, self.last_good)
            if remedy == "reset":
                self.last_good = take_snapshot(self.wrapped)
            if remedy == "freeze":
                self.frozen = True
            self.detector.forget_predictions_()
            self.accuracy.forget_()
        self.record(kind, cause)

    # ---- health, events and feedback ----

    @property
    def collapse_score(self) -> float:
        """Score of the last inspected batch, from 0 to 10: healthy below 0.5, an alarm from 1 on."""
        return self.health.collapse_score

    @property
    def is_sorted(self) -> bool:
        """Whether batches arrive sorted by class, so that the source answers as it was trained."""
        return self.schedule.is_sorted and self.on_collapse is not None

    @property
    def events(self) -> list[Event]:
        """The last hundred events, oldest first."""
        return list(self._events)

    def record(self, kind: EventKind, cause: str) -> None:
        """Log an event together with the last known health.

        Args:
            kind: What happened.
            cause: Why, in words.
        """
        event = Event(self.num_steps, kind, cause, self.health.as_dict())
        if self.audit is not None:
            append_to_audit_log(self.audit, event)
        self._events = (*self._events, event)[-_MAX_EVENTS:]

    def rollback(self) -> Self:
        """Return to the last good snapshot, which is the source until there is one.

        Returns:
            The model itself.
        """
        self._apply_remedy("rollback", "requested", EventKind.ROLLBACK)
        return self

    def feedback(
        self,
        ids: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor | None = None,
        *,
        right: Sequence[bool] | Tensor | None = None,
    ) -> FeedbackSummary:
        """Take labels for some of the last answers, and tell by them whether adaptation helps.

        Nothing is trained on the labels. If they show harm by more than noise, ``on_harm`` is applied. Estimates
        without labels are corrected by what the labels show, as long as the answers are remembered and the stream
        looks as it did then.

        Args:
            ids: Ids of the answers: :attr:`last_ids` after each call has one for each input. Those that are not
                remembered any more are ignored.
            labels: The right class of each.
            right: Whether each answer is right, in place of labels. A wrong answer leaves open whether the source's, if
                it is another one, is right: then the gain has bounds only, and harm cannot be shown.

        Returns:
            The accuracy of the labeled answers, that of the source, and their difference with an interval.

        Raises:
            ConfigError: The guard remembers no answers.
            InputError: There are more or fewer labels than ids, or a label is negative; or both or none are given.
        """
        summary, _ = self.accuracy.set_labels_(ids, labels, right=right)
        if summary.is_harmful:
            self._apply_remedy(self.on_harm, str(summary), EventKind.HARM)
        return summary

    # ---- contract of a model that delegates to another one ----

    @override
    def reset(self) -> Self:
        audit, events, before = self.audit, self._events, self.accuracy.answers
        super().reset()
        self.audit, self._events = audit, events
        if before is not None and self.accuracy.answers is not None:
            self.accuracy.answers.count.fill_(before.num_answered)  # an id never stands for two answers
        self.record(EventKind.RESET, "requested")
        return self

    @override
    def freeze(self) -> Self:
        super().freeze()
        self.record(EventKind.FREEZE, "requested")
        return self

    @override
    def unfreeze(self) -> Self:
        super().unfreeze()
        self.record(EventKind.UNFREEZE, "requested")
        return self

    @override
    def fork(self) -> Self:
        fresh = type(self)(self.wrapped.fork(), **self.hyperparameters)
        match_dtypes_(fresh, self)
        return fresh

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        return self.wrapped.deploy(batches)

    @override
    def on_load(self, path: str | os.PathLike[str]) -> None:
        low, high = self.validator.expected_range
        if not low < high:
            raise CheckpointError(f"{path} does not fit: it takes inputs from {low:g} to {high:g}, which is nothing")
        self.record(EventKind.LOAD, f"from {path}")

    @property
    @override
    def hyperparameters(self) -> dict[str, Any]:
        # Without the audit log: files from elsewhere must not say where to write, and it belongs to one stream.
        return {name: value for name, value in super().hyperparameters.items() if name != "audit"}

    @override
    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        dtype_before = _dtype(self.wrapped)
        del self.source  # a fork may share it: the wrapped model makes its own copy first, and moves that
        nn.Module._apply(self, fn, recurse)
        self.source = self.last_good.source = self.wrapped.source
        if _dtype(self.wrapped) != dtype_before:
            self.validator.forget_dtype_()
        return self


def _dtype(net: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in net.parameters()), None)
