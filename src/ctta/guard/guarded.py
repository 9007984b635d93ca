"""The guard around a method."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import SingleProcess, change_call
from ctta.core.transaction import restore_on_error
from ctta.core.validation import check_choice, check_integer
from ctta.errors import CheckpointError, ConfigError
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
from ctta.guard.estimate import GainEstimator, GainMonitor
from ctta.guard.health import Event, EventKind, Health, append_to_audit_log
from ctta.guard.recovery import REMEDIES, Schedule, take_snapshot
from ctta.guard.validator import InputSpec, InputValidator
from ctta.nn import batch_fraction

_LEARNED_SPEC, _DEFAULT_THRESHOLDS = InputSpec(), CollapseThresholds()
_SHADOW_REPORT_EVERY = 100  # batches
_MAX_EVENTS = 100  # kept in memory


class _FewClassesSuspected(Exception):
    """Raised to undo a step on a batch that looks as if it had few classes; nobody outside sees it."""


class Guarded(AdaptiveModel):
    """A method with input validation, health signals, collapse detection, remedies and an event log.

    It is itself an :class:`~ctta.AdaptiveModel`. While the stream is healthy, the wrapped method predicts and adapts as
    it would alone. An alarm is raised if its predictions differ from the source's more often than the source's own
    uncertainty explains, or lose classes that the source still predicts. Then the source's weights predict that batch,
    ``on_collapse`` is applied to the method, and it pauses for a while, longer after each relapse. If batches arrive
    sorted by class, batch statistics are useless: until that ends, the source predicts with its running statistics, and
    nothing is adapted. The same happens to a single batch with few classes, also to the first one.

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
        adapt_every: Adapt to every n-th batch only, and predict the others.
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
        estimator: What estimates accuracies without labels, from :func:`ctta.calibrate_gain`, for
            ``health.estimated_gain``; None for no estimate. It costs no pass, as it uses what inspections evaluate.
        on_harm: What to do when labels, or the estimate, show that adaptation harms by more than noise: ``"reset"`` to
            the source, ``"freeze"`` (roll back and stop adapting), or None to only report.
        audit: File that gets a line of JSON per event. It is not saved with the stream, and forks do not get it.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> from ctta.methods import Tent
    >>> model = Guarded(Tent(net), bad_rows="source")
    >>> logits = model(torch.rand(16, 3, 8, 8))    # predicts and adapts
    >>> model.collapse_score
    0.0
    """

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
        estimator: GainEstimator | None = None,
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
        if estimator is not None and not isinstance(estimator, GainEstimator):
            raise TypeError(f"expected estimator=ctta.calibrate_gain(...), got {type(estimator).__name__}")
        if reset_every is not None:
            check_integer("reset_every", reset_every, 1)
        if max_update is not None and not max_update > 0:
            raise ConfigError(f"max_update must be above 0, or None for no limit, got {max_update!r}")
        if not isinstance(model, AdaptiveModel) or model.wrapped is not None:
            raise TypeError(f"expected a method to guard, such as ctta.CoTTA(net), got {type(model).__name__}")
        super().__init__(model, batch_stats=model.batch_stats, seed=model.seed, output=model.output)
        self.input_spec, self.bad_rows, self.on_collapse, self.on_harm = input_spec, bad_rows, on_collapse, on_harm
        self.reset_every, self.adapt_every, self.max_update, self.shadow = reset_every, adapt_every, max_update, shadow
        self.thresholds, self.inspect_every, self.snapshot_every = thresholds, inspect_every, snapshot_every
        self.cooldown, self.remember_answers, self.estimator = cooldown, remember_answers, estimator
        self.frozen, model.frozen = model.frozen, False  # the guard decides when to adapt
        self.wrapped, self.last_good = model, take_snapshot(model)
        self.validator = InputValidator(input_spec)
        self.detector = CollapseDetector(thresholds)
        self.schedule = Schedule(adapt_every, inspect_every, snapshot_every, cooldown, on_collapse)
        self.accuracy = AccuracyTracker(
            AnswerLog(remember_answers) if remember_answers else None,
            None if estimator is None else GainMonitor(estimator),
        )
        self.health, self.last_ids = Health(step=0), None
        self.audit = None if audit is None else os.fspath(audit)
        self._events: tuple[Event, ...] = ()  # replaced, and not changed: a failed step is undone with its events
        self._source_logits: Tensor | None = None  # within a step only
        self.register_counter("num_compared")
        self.register_counter("num_differing")

    @override
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
    def adapt_step(self, x: Tensor) -> Tensor:
        # The source, a remedy or the audit log may fail after the method has learned; the batch must then not count, or
        # a retry would learn twice.
        with restore_on_error(self) as undo:
            if (valid := self._find_valid_rows(x)) is not None:
                bad = f"{int((~valid).sum())} of {len(x)} inputs, not finite or out of range,"
                self.record(EventKind.BAD_ROWS, f"{bad} are predicted by the source")
            events = self._events
            try:
                return self._adapt_and_remember(x)
            except _FewClassesSuspected:
                undo()
                self._events = events
                return self._adapt_and_remember(x, inspect=True)

    def _find_valid_rows(self, x: Tensor) -> Tensor | None:
        """Return a mask of the valid inputs; None if all of them are."""
        if self.bad_rows == "refuse":  # by check_input, so that none gets here
            return None
        valid = self.validator.valid_rows(x)
        return None if valid.all() else valid

    def _adapt_and_remember(self, x: Tensor, *, inspect: bool = False) -> Tensor:
        self.last_step = None
        logits = self._replace_bad_rows(x, partial(self._adapt, inspect=inspect))
        self._remember_answers(x, logits)
        if self.reset_every is not None and (self.num_steps + 1) % self.reset_every == 0:
            self._apply_remedy("reset", f"every {self.reset_every} batches", EventKind.PERIODIC_RESET)
        return logits

    def _remember_answers(self, x: Tensor, logits: Tensor) -> None:
        """Remember the answers to a batch beside the source's, if they are asked for."""
        source_logits, self._source_logits = self._source_logits, None
        if self.accuracy.answers is None or logits.ndim != 2:
            return
        if source_logits is None or len(source_logits) != len(x):  # some inputs were not valid
            with torch.no_grad():
                source_logits = source_as_trained(self.source)(x)
        by_source = self.health.answered_by_source
        self.last_ids = self.accuracy.add_(logits.argmax(1), source_logits.argmax(1), by_source=by_source)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._replace_bad_rows(x, self._predict)

    @override
    def _forward_once(self, x: Tensor) -> Tensor:
        return self._replace_bad_rows(x, self.wrapped.predict_once)

    def _replace_bad_rows(self, x: Tensor, predict: Callable[[Tensor], Tensor]) -> Tensor:
        """Predict the valid inputs as if they had come alone, and the others by the source as it was trained."""
        if (valid := self._find_valid_rows(x)) is None:
            return predict(x)
        logits: Tensor = source_as_trained(self.source)(x)
        if valid.any():
            with change_call(num_images=int(valid.sum())):  # the other rows have no part in batch statistics
                logits[valid] = predict(x[valid]).to(logits.dtype)
        return logits

    def _predict(self, x: Tensor) -> Tensor:
        baseline = self._evaluate_baseline(x)
        with reuse_source_pass(self.source, x, baseline):
            logits = self.wrapped.predict(x)
        diagnostics = diagnose(self.wrapped, x, logits, baseline, self.detector)
        if suspect_few_classes(self.source, x, diagnostics, self.detector):
            baseline = self._evaluate_baseline(x, inspect=True)
            diagnostics = diagnose(self.wrapped, x, logits, baseline, self.detector)
        return self._select_logits(logits, diagnostics)

    def _adapt(self, x: Tensor, *, inspect: bool) -> Tensor:
        # First, since nothing is to be learned from a batch of few classes.
        baseline = self._evaluate_baseline(x, inspect=inspect)
        self._source_logits = baseline.source_logits
        inspect = baseline.is_inspected
        adapt = self.schedule.should_adapt(self.num_steps, baseline.few_classes)
        # Before the step, since the predictions show the health of these weights, and not of the updated ones.
        candidate = take_snapshot(self.wrapped) if adapt and inspect and self.schedule.should_snapshot() else None
        with (
            record_step(self.wrapped, x, self.max_update, inspect=inspect) as step,
            reuse_source_pass(self.source, x, baseline),
        ):
            logits = self.wrapped.adapt(x) if adapt else self.wrapped.predict(x)
        diagnostics = diagnose(self.wrapped, x, logits, baseline, self.detector)
        if suspect_few_classes(self.source, x, diagnostics, self.detector):
            raise _FewClassesSuspected
        monitor = self.accuracy.gain_monitor
        if monitor is not None and baseline.source is not None and logits.ndim == 2:
            monitor.add_(diagnostics.predictions, baseline.source)
        self.validator.learn_(x)
        self.last_step = self.wrapped.last_step if adapt else None
        selected = self._select_logits(logits, diagnostics)
        self.health = self._measure_health(diagnostics, step, adapted=adapt, by_source=selected is not logits)
        is_good = candidate is not None and diagnostics.verdict is not None and diagnostics.verdict.is_healthy
        if candidate is not None and is_good:
            self.last_good = candidate
        self.schedule.count_batch_(adapted=adapt, score=diagnostics.score, snapshot=is_good)
        if diagnostics.verdict is None and self.detector.is_sure(diagnostics.predictions):
            self.schedule.inspect_next_()
        if self.last_step is not None and self.last_step.skipped:
            self.num_skipped += 1
            self.record(EventKind.SKIPPED, "the loss or a gradient was not finite")
        if self.shadow:
            self._count_differences(diagnostics)
        if diagnostics.baseline.few_classes < 1 and not self.schedule.is_sorted:
            self.detector.remember_confidence_(diagnostics.predictions)
        if diagnostics.verdict is not None:
            self.detector.remember_(diagnostics.verdict)
        if (reaction := self.schedule.react_(diagnostics)) is not None:
            self._apply_remedy(reaction.remedy, reaction.cause, reaction.kind)
        estimate = self.accuracy.estimate()
        if estimate is not None and estimate.is_harmful and self.on_harm is not None:
            self._apply_remedy(self.on_harm, str(estimate), EventKind.HARM)
        return selected

    def _evaluate_baseline(self, x: Tensor, *, inspect: bool = False) -> Baseline:
        inspect = inspect or self.schedule.should_inspect()
        if inspect or self.shadow or self.schedule.is_sorted or self.accuracy.answers is not None:
            return evaluate_baseline(self.wrapped, x, self.detector, inspect=inspect)
        return Baseline()

    def _select_logits(self, logits: Tensor, diagnostics: Diagnostics) -> Tensor:
        """Return the method's logits, or the source's where those cannot be trusted."""
        selected: Tensor | None = logits
        if self.shadow:
            selected = diagnostics.baseline.source_logits
        elif self.on_collapse is None:
            return logits
        elif self.schedule.judge_sorted(diagnostics) or diagnostics.baseline.few_classes >= 1:
            selected = diagnostics.baseline.source_logits
        elif diagnostics.verdict is not None and diagnostics.verdict.collapse >= 1:
            selected = diagnostics.baseline.anchor_logits
        assert selected is not None, "the source was evaluated"
        return selected

    def _measure_health(self, found: Diagnostics, step: StepRecord, *, adapted: bool, by_source: bool) -> Health:
        pairs = pair_with_source(self.wrapped, trained_only=True) if found.verdict else []
        originals = [original for _, original in pairs]
        distance = relative_norm([new - original for new, original in pairs], originals) if pairs else None
        student = step.student_classes
        return Health(
            step=self.num_steps,
            **found.signals(),
            student_disagreement=(
                None if student is None else float((student != found.predictions.classes).double().mean())
            ),
            distance_to_source=distance,
            update_norm=None if step.update_norm is None else step.update_norm * self.wrapped.step_scale,
            batch_stats=batch_fraction(self.source, len(found.predictions.classes)),
            skipped=self.last_step.skipped if self.last_step else None,
            adapted=adapted,
            answered_by_source=by_source,
            collapse_score=self.health.collapse_score if found.score is None else found.score,
            **(estimate.as_signals() if (estimate := self.accuracy.estimate()) else {}),
        )

    def _count_differences(self, diagnostics: Diagnostics) -> None:
        """Count the predictions that differ from the source's, and report them regularly."""
        source = diagnostics.baseline.source
        assert source is not None, "the source was evaluated"
        self.num_compared += diagnostics.predictions.classes.numel()
        self.num_differing += int((diagnostics.predictions.classes != source.classes).sum())
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
        """Score of the last inspected batch; an alarm is raised at 1."""
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
        summary, _ = self.accuracy.set_labels_(ids, labels)
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
        for name, buffer in self.named_buffers():  # move what was built on the default device and dtype
            part, _, own = name.rpartition(".")
            if not part.startswith(("source", "wrapped", "last_good")):
                setattr(fresh.get_submodule(part), own, fresh.get_buffer(name).to(buffer))
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
