"""The guard around a method."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import SingleProcess
from ctta.core.transaction import restore_on_error
from ctta.core.validation import check_choice, check_integer
from ctta.errors import CheckpointError, ConfigError
from ctta.guard.answers import AnswerLog
from ctta.guard.detector import CollapseDetector, CollapseThresholds
from ctta.guard.diagnostics import (
    Diagnostics,
    References,
    StepRecord,
    diagnose,
    evaluate_references,
    record_step,
    reuse_source_pass,
    source_as_trained,
    suspect_few_classes,
)
from ctta.guard.estimate import GainEstimator, GainMonitor
from ctta.guard.events import EventKind
from ctta.guard.feedback import GuardFeedback
from ctta.guard.health import Health, relative_norm, trained_pairs
from ctta.guard.remedies import Remedy, take_snapshot
from ctta.guard.schedule import Schedule
from ctta.guard.validator import InputSpec, InputValidator
from ctta.nn import batch_fraction, count_images

_LEARNED_SPEC, _DEFAULT_THRESHOLDS = InputSpec(), CollapseThresholds()
_SHADOW_REPORT_EVERY = 100  # batches


class _FewClassesSuspected(Exception):
    """Raised to undo a step on a batch that looks as if it had few classes; nobody outside sees it."""


class Guarded(GuardFeedback):
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
    num_compared: int
    num_differing: int

    def __init__(
        self,
        model: AdaptiveModel,
        *,
        input_spec: InputSpec = _LEARNED_SPEC,
        bad_rows: Literal["refuse", "source"] = "refuse",
        on_collapse: Remedy | None = "rollback",
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
        if not isinstance(model, AdaptiveModel) or isinstance(model, Guarded):
            raise TypeError(f"expected a method to guard, such as ctta.CoTTA(net), got {type(model).__name__}")
        if type(model.coordinator) is not SingleProcess:
            raise ConfigError(
                "a guard decides by its local rows, so ranks that share a stream would disagree: guard a model on one "
                "process, or share it without a guard"
            )
        if not isinstance(input_spec, InputSpec) or not isinstance(thresholds, CollapseThresholds):
            raise TypeError(
                f"expected input_spec=ctta.guard.InputSpec(...) and thresholds=ctta.guard.CollapseThresholds(...), got "
                f"{input_spec!r} and {thresholds!r}"
            )
        check_choice("bad_rows", bad_rows, ("refuse", "source"))
        if on_collapse is not None:
            check_choice("on_collapse", on_collapse, get_args(Remedy))
        if on_harm is not None:
            check_choice("on_harm", on_harm, ("reset", "freeze"))
        check_integer("remember_answers", remember_answers, 0)
        if estimator is not None and not isinstance(estimator, GainEstimator):
            raise TypeError(f"expected estimator=ctta.calibrate_gain(...), got {type(estimator).__name__}")
        if reset_every is not None:
            check_integer("reset_every", reset_every, 1)
        if max_update is not None and not max_update > 0:
            raise ConfigError(f"max_update must be above 0, or None for no limit, got {max_update!r}")
        nn.Module.__init__(self)  # and not AdaptiveModel's, which copies a network: the wrapped model has one
        self._batch_stats, self._output, self._trainable = model.batch_stats, model.output, model._trainable
        self.seed, self.optimizer, self.last_step, self.frozen = model.seed, None, None, model.frozen
        model.frozen = False  # the guard decides when to adapt
        self.source, self.wrapped, self.good = model.source, model, take_snapshot(model)
        self.input_spec, self.bad_rows, self.on_collapse, self.reset_every = (
            input_spec,
            bad_rows,
            on_collapse,
            reset_every,
        )
        self.adapt_every, self.max_update, self.shadow, self.thresholds = adapt_every, max_update, shadow, thresholds
        self.inspect_every, self.snapshot_every, self.cooldown = inspect_every, snapshot_every, cooldown
        self.detector = CollapseDetector(thresholds)
        self.schedule = Schedule(adapt_every, inspect_every, snapshot_every, cooldown)
        self.validator = InputValidator(input_spec)
        self.remember_answers, self.estimator, self.on_harm = remember_answers, estimator, on_harm
        self.gain_monitor = None if estimator is None else GainMonitor(estimator)
        self.answers = AnswerLog(remember_answers) if remember_answers else None
        self.last_ids, self._source_logits = None, None
        self.audit, self.health, self._events = audit, Health(step=0), ()
        for name in ("num_steps", "num_skipped", "num_compared", "num_differing"):  # the last two in shadow mode
            self.register_counter(name)

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
            self._record_bad_rows(x)
            events = self._events
            try:
                return self._adapt_and_remember(x)
            except _FewClassesSuspected:
                undo()
                self._events = events
                return self._adapt_and_remember(x, inspect=True)

    def _record_bad_rows(self, x: Tensor) -> None:
        if (valid := self._find_valid_rows(x)) is not None:
            num_bad = int((~valid).sum())
            cause = f"{num_bad} of {len(x)} inputs, not finite or out of range, are predicted by the source"
            self.record(EventKind.BAD_ROWS, cause)

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
            with count_images(int(valid.sum())):  # the other rows have no part in batch statistics
                logits[valid] = predict(x[valid]).to(logits.dtype)
        return logits

    def _predict(self, x: Tensor) -> Tensor:
        references = self._evaluate_references(x)
        with reuse_source_pass(self.source, x, references):
            logits = self.wrapped.predict(x)
        diagnostics = self._diagnose(x, logits, references)
        if self._suspects_few_classes(x, diagnostics):
            diagnostics = self._diagnose(x, logits, self._evaluate_references(x, inspect=True))
        return self._select_logits(logits, diagnostics)

    def _suspects_few_classes(self, x: Tensor, found: Diagnostics) -> bool:
        is_judged = found.references.is_inspected
        return not is_judged and suspect_few_classes(self.source, x, found.predictions, self.detector)

    def _adapt(self, x: Tensor, *, inspect: bool) -> Tensor:
        # First, since nothing is to be learned from a batch of few classes.
        references = self._evaluate_references(x, inspect=inspect)
        self._source_logits = references.source_logits
        inspect = references.is_inspected
        adapt = self.schedule.should_adapt(self.num_steps, even_if_sorted=self.on_collapse is None)
        adapt = adapt and (references.few_classes < 1 or self.on_collapse is None)
        # Before the step, since the predictions show the health of these weights, and not of the updated ones.
        candidate = take_snapshot(self.wrapped) if adapt and inspect and self.schedule.should_snapshot() else None
        with (
            record_step(self.wrapped, self.max_update, inspect=inspect) as step,
            reuse_source_pass(self.source, x, references),
        ):
            logits = self.wrapped.adapt(x) if adapt else self.wrapped.predict(x)
        diagnostics = self._diagnose(x, logits, references)
        if self._suspects_few_classes(x, diagnostics):
            raise _FewClassesSuspected
        if self.gain_monitor is not None and references.source is not None and logits.ndim == 2:
            self.gain_monitor.add_(diagnostics.predictions, references.source)
        self.validator.learn_(x)
        self.last_step = self.wrapped.last_step if adapt else None
        selected = self._select_logits(logits, diagnostics)
        self.health = self._measure_health(diagnostics, step, adapted=adapt, by_source=selected is not logits)
        is_good = candidate is not None and diagnostics.verdict is not None and diagnostics.verdict.is_healthy
        if candidate is not None and is_good:
            self.good = candidate
        self.schedule.count_batch_(adapted=adapt, score=diagnostics.score, snapshot=is_good)
        if diagnostics.verdict is None and self.detector.is_sure(diagnostics.predictions):
            self.schedule.inspect_next_()
        if self.last_step is not None and self.last_step.skipped:
            self.num_skipped += 1
            self.record(EventKind.SKIPPED, "the loss or a gradient was not finite")
        if self.shadow:
            self._count_differences(diagnostics)
        self._apply_verdict(diagnostics)
        self._check_gain()
        return selected

    def _evaluate_references(self, x: Tensor, *, inspect: bool = False) -> References:
        return evaluate_references(
            self.wrapped,
            x,
            self.detector,
            inspect=inspect or self.schedule.should_inspect(),
            evaluate_source=self.shadow or self.schedule.is_sorted or self.answers is not None,
        )

    def _diagnose(self, x: Tensor, logits: Tensor, references: References) -> Diagnostics:
        return diagnose(self.wrapped, x, logits, references, self.detector)

    def _select_logits(self, logits: Tensor, diagnostics: Diagnostics) -> Tensor:
        """Return the method's logits, or the source's where those cannot be trusted."""
        selected: Tensor | None = logits
        if self.shadow:
            selected = diagnostics.references.source_logits
        elif self.on_collapse is None:
            selected = logits
        elif self._is_sorted(diagnostics) or diagnostics.references.few_classes >= 1:
            selected = diagnostics.references.source_logits
        elif diagnostics.verdict is not None and diagnostics.verdict.collapse >= 1:
            selected = diagnostics.references.anchor_logits
        assert selected is not None, "the source was evaluated"
        return selected

    def _measure_health(self, found: Diagnostics, step: StepRecord, *, adapted: bool, by_source: bool) -> Health:
        pairs = trained_pairs(self.wrapped) if found.verdict else []
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
            **(estimate.as_signals() if (estimate := self._estimate_gain()) else {}),
        )

    def _count_differences(self, diagnostics: Diagnostics) -> None:
        """Count the predictions that differ from the source's, and report them regularly."""
        source = diagnostics.references.source
        assert source is not None, "the source was evaluated"
        self.num_compared += diagnostics.predictions.classes.numel()
        self.num_differing += int((diagnostics.predictions.classes != source.classes).sum())
        if (self.num_steps + 1) % _SHADOW_REPORT_EVERY == 0:
            self.record(EventKind.SHADOW, f"{self.num_differing} of {self.num_compared} predictions would differ")

    # ---- contract of a model that delegates to another one ----

    @override
    def reset(self) -> Self:
        events, audit = self._events, self.audit  # they stay
        num_answered = self.answers.num_answered if self.answers is not None else 0
        super().reset()
        self._events, self.audit = events, audit
        if self.answers is not None:
            self.answers.count.fill_(num_answered)  # an id never stands for two answers
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
            if part in ("detector", "schedule", "validator", "answers", "gain_monitor"):
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
        self.source = self.good.source = self.wrapped.source
        if _dtype(self.wrapped) != dtype_before:
            self.validator.forget_dtype_()
        return self


def _dtype(net: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in net.parameters()), None)
