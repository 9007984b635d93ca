"""Diagnostics of one batch: the method's predictions beside the source's, and what its optimizer step did."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import current_call
from ctta.functional import widest_float
from ctta.guard.detector import MIN_BATCH_SIZE, CollapseDetector, Verdict
from ctta.guard.estimate import InputShift, measure_inputs, record_inputs
from ctta.guard.summary import PredictionSummary, Reading, Readout, disagreement, summarize
from ctta.nn import use_running_statistics_, uses_batch_statistics
from ctta.nn.norm import attach_norm_hooks_
from ctta.nn.surgery import copy_sharing_tensors

SCREEN_SIZE = 16  # inputs of a batch, at least, that the source predicts to find out whether it has few classes
MAX_SCREEN_CHANCE = 0.01  # probability that a part of a shuffled batch has so few classes

_as_trained: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def source_as_trained(source: nn.Module) -> nn.Module:
    """Return a source network whose BatchNorms use their running statistics, whatever the method uses.

    It is a second tree of modules over the same tensors, which any thread may call; it is built once for each source.
    """
    if source not in _as_trained:
        net = copy_sharing_tensors(source)
        use_running_statistics_(net)
        attach_norm_hooks_(net, lambda layer: InputShift(), skip_without_statistics=True)
        _as_trained[source] = net
    return _as_trained[source]


@dataclass(frozen=True)
class Baseline:
    """What the source's weights predict for a batch, before the method does; the parts only if they were evaluated."""

    source_logits: Tensor | None = None
    anchor_logits: Tensor | None = None
    source: PredictionSummary | None = None
    anchor: PredictionSummary | None = None
    tests_sorting: bool = False  # whether class-sorted batches would spoil the method's statistics
    inputs: Reading | None = None  # of the source's BatchNorms
    has_own_anchor: bool = False  # whether the method would differ from the source without having learned anything

    @property
    def is_inspected(self) -> bool:
        """Whether the batch is judged."""
        return self.anchor is not None


@torch.no_grad()
def evaluate_baseline(model: AdaptiveModel, x: Tensor, readout: Readout, *, inspect: bool) -> Baseline:
    """Let the source predict a batch as it was trained and, to judge it, as the method would if it had learned nothing.

    For the latter, the BatchNorms of the method's source use its statistics, unless it has an anchor of its own.
    """
    with record_inputs() as record:
        source_logits = source_as_trained(model.source)(x)
    source = summarize(model.judged_logits(source_logits, x), readout)
    if not inspect:
        return Baseline(source_logits, source=source)
    inputs = readout.add(measure_inputs(source_as_trained(model.source), record))
    uses_batch = uses_batch_statistics(model.source)
    own = model.source(x) if uses_batch else model.anchor_logits(x)
    anchor_logits, anchor = (
        (source_logits, source) if own is None else (own, summarize(model.judged_logits(own, x), readout))
    )
    tests_sorting = uses_batch and source_logits.ndim == 2
    if tests_sorting and len(x) >= MIN_BATCH_SIZE:
        source.compare_confidences(anchor)
    has_own_anchor = own is not None and not uses_batch
    return Baseline(source_logits, anchor_logits, source, anchor, tests_sorting, inputs, has_own_anchor)


@torch.no_grad()
def suspect_few_classes(source: nn.Module, x: Tensor, found: "Diagnostics", detector: CollapseDetector) -> bool:
    """Return whether a batch that was not judged looks as if it had few classes, so that it should be.

    The source is asked only if the method is less sure than usual, and then about every n-th input, which costs less
    than all of them.
    """
    labels_images = found.predictions.classes.ndim == 1
    if found.baseline.is_inspected or len(x) < MIN_BATCH_SIZE or not labels_images or not uses_batch_statistics(source):
        return False
    if not detector.is_unsure(found.predictions):
        return False
    logits = source_as_trained(source)(x[:: max(1, len(x) // SCREEN_SIZE)])
    excess, chance = detector.measure_concentration(summarize(logits))
    return chance < MAX_SCREEN_CHANCE and excess >= detector.thresholds.few_classes


@contextmanager
def reuse_source_pass(source: nn.Module, x: Tensor, baseline: Baseline) -> Iterator[None]:
    """Let a method that asks its source for this very batch have the logits that were computed to judge the batch."""
    known = baseline.anchor_logits if uses_batch_statistics(source) else baseline.source_logits
    if known is None:
        yield
        return
    version = x._version

    def is_known(given: Tensor) -> bool:
        call = current_call()
        # With gradients on, torch may pick kernels that round differently; features need a pass of their own.
        is_plain = call.features is None and call.batch_facts is None and not call.has_other_statistics
        if torch.is_grad_enabled() or not is_plain or call.num_images != len(x):
            return False
        same_values = given.data_ptr() == x.data_ptr() and given._version == version
        return same_values and given.shape == x.shape and given.stride() == x.stride()

    with _replace_call(source, lambda call, given: known.clone() if is_known(given) else call(given)):
        yield


@dataclass(frozen=True)
class Diagnostics:
    """What is known about a batch; the verdict only if it was judged."""

    predictions: PredictionSummary
    baseline: Baseline
    verdict: Verdict | None = None
    few_classes: float = 0.0  # score of the batch alone

    @property
    def score(self) -> float | None:
        """The score of the verdict; None if the batch was not inspected."""
        verdict = self.verdict
        return None if verdict is None else max(verdict.collapse, verdict.sorting, self.few_classes)

    def signals(self) -> dict[str, Any]:
        """Return the signals as fields of :class:`~ctta.guard.Health`."""
        found: dict[str, Any] = {}
        source, anchor = self.baseline.source, self.baseline.anchor
        for prefix, summary in (("", self.predictions), ("source_", source), ("anchor_", anchor)):
            if summary is not None:
                found |= {
                    f"{prefix}{name}": getattr(summary, name)
                    for name in ("confidence", "entropy", "mean_prediction_entropy")
                }
                if prefix:
                    found[f"{prefix}disagreement"] = disagreement(self.predictions, summary)
        return found | ({"class_sorting": self.verdict.class_sorting} if self.verdict else {})


@torch.no_grad()
def diagnose(
    model: AdaptiveModel, x: Tensor, predictions: PredictionSummary, baseline: Baseline, detector: CollapseDetector
) -> Diagnostics:
    """Judge the predictions of a method if the batch is inspected, which it always is if they are not finite."""
    for other in (baseline.source, baseline.anchor):
        if other is not None:
            predictions.count_differences(other)  # to be read with the rest
    if baseline.source is not None and baseline.is_inspected and predictions.classes.ndim == 1:
        predictions.compare_answers(baseline.source)
    if not predictions.is_finite and not baseline.is_inspected:
        baseline = evaluate_baseline(model, x, predictions.readout, inspect=True)
    if baseline.anchor is None:
        return Diagnostics(predictions, baseline)
    source = baseline.source if baseline.tests_sorting else None
    few_classes = 0.0 if source is None else detector.judge_batch(source, baseline.anchor)
    return Diagnostics(predictions, baseline, detector.judge(predictions, baseline.anchor, source), few_classes)


@dataclass
class StepRecord:
    """What was observed during a step; None where nothing was."""

    update_norm: Tensor | None = None  # relative to the norm that the trained parameters have in the source
    student_classes: Tensor | None = None  # where a teacher predicts


@contextmanager
def record_step(model: AdaptiveModel, x: Tensor, max_update: float | None, *, inspect: bool) -> Iterator[StepRecord]:
    """Limit the optimizer's step within the context to ``max_update`` and, on inspection, measure it.

    Hooks of the optimizer do both, so that a teacher that averages students gets the limited step.
    """
    record = StepRecord()

    def call_and_keep(call: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        logits = call(given)
        if given.data_ptr() == x.data_ptr() and given.shape == x.shape:  # and not a view, or images of a memory
            record.student_classes = logits.detach().argmax(1)
        return logits

    with ExitStack() as stack:
        if model.optimizer is not None and (inspect or max_update is not None):
            stack.enter_context(_limit_updates(model, model.optimizer, max_update, record))
        model._prepare_networks()
        if inspect and hasattr(model, "teacher"):
            for student in model.trained_networks:
                stack.enter_context(_replace_call(student, call_and_keep))
        yield record


@contextmanager
def _limit_updates(
    model: AdaptiveModel, optimizer: Optimizer, max_update: float | None, record: StepRecord
) -> Iterator[None]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    originals = [original for _, original in pair_with_source(model, trained_only=True)]
    before: list[Tensor] = []

    def keep(*_: Any) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def limit(*_: Any) -> None:
        changes = [new - old for new, old in zip(parameters, before, strict=True)]
        record.update_norm = norm = relative_norm(changes, originals)
        if max_update is not None:
            for parameter, old, change in zip(parameters, before, changes, strict=True):
                own_norm = norm.to(parameter.device)  # a network may be on several
                limited = old + change * (max_update / own_norm)
                parameter.copy_(torch.where(own_norm > max_update, limited, parameter))

    handles = [optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(limit)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replace_call(
    net: nn.Module, replacement: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> Iterator[None]:
    """Let calls of a network within the context be ``replacement(call, x)``, with its own call as the first argument.

    Around the call and not a hook within it, for which a compiled network would be compiled anew.
    """
    compiled = net._compiled_call_impl
    call: Callable[[Tensor], Tensor] = net._call_impl if compiled is None else compiled
    net._compiled_call_impl = lambda x: replacement(call, x)
    try:
        yield
    finally:
        net._compiled_call_impl = compiled


def pair_with_source(model: AdaptiveModel, *, trained_only: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of a method's networks, or the trained ones, each with the source's of the same name."""
    originals = dict(model.source.named_parameters())
    return [
        (parameter, originals[name])
        for network in model.children()
        if network is not model.source
        for name, parameter in network.named_parameters()
        if name in originals and (parameter.requires_grad or not trained_only)
    ]


@torch.no_grad()
def relative_norm(differences: Iterable[Tensor], originals: Iterable[Tensor]) -> Tensor:
    """Return the norm of all differences together, relative to that of the originals."""
    norm, scale = (nn.utils.get_total_norm(list(tensors)) for tensors in (differences, originals))
    dtype = widest_float(norm.device)
    return norm.to(dtype) / scale.to(norm.device, dtype).clamp_min(1e-12)
