"""Diagnostics of one batch: the method's predictions beside the source's, and what its optimizer step did."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.base import AdaptiveModel
from ctta.guard.detector import Verdict
from ctta.guard.health import PredictionSummary, disagreement, relative_norm, summarize, trained_pairs
from ctta.norms import use_running_statistics_, uses_batch_statistics
from ctta.surgery import copy_sharing_tensors

Judge = Callable[[PredictionSummary, PredictionSummary, PredictionSummary | None], Verdict]

_as_trained: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def source_as_trained(source: nn.Module) -> nn.Module:
    """Return a source network whose BatchNorms use their running statistics, whatever the method uses.

    It is a second tree of modules over the same tensors, which any thread may call; it is built once for each source.
    """
    if source not in _as_trained:
        net = copy_sharing_tensors(source)
        use_running_statistics_(net)
        _as_trained[source] = net
    return _as_trained[source]


@dataclass(frozen=True)
class Diagnostics:
    """What is known about a batch; the parts of source and anchor only if they were evaluated."""

    predictions: PredictionSummary
    source_logits: Tensor | None = None
    anchor_logits: Tensor | None = None
    source: PredictionSummary | None = None
    anchor: PredictionSummary | None = None
    verdict: Verdict | None = None

    @property
    def score(self) -> float | None:
        """The score of the verdict; None if the batch was not inspected."""
        return None if self.verdict is None else self.verdict.score

    def signals(self) -> dict[str, Any]:
        """Return the signals as fields of :class:`~ctta.guard.Health`."""
        found: dict[str, Any] = {}
        for prefix, summary in (("", self.predictions), ("source_", self.source), ("anchor_", self.anchor)):
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
    source: nn.Module, x: Tensor, logits: Tensor, judge: Judge, *, inspect: bool, evaluate_source: bool
) -> Diagnostics:
    """Diagnose the logits of a method.

    Args:
        source: Source network of the method; its BatchNorms use the method's statistics.
        x: The batch.
        logits: The method's.
        judge: Returns the verdict from the summaries of method, anchor and (for the class-sorting test) source.
        inspect: Whether to judge this batch; logits that are not finite are judged in any case.
        evaluate_source: Whether to evaluate the source also if the batch is not judged.
    """
    predictions = summarize(logits)
    inspect = inspect or not predictions.is_finite
    if not inspect and not evaluate_source:
        return Diagnostics(predictions)
    source_logits = source_as_trained(source)(x)
    source_predictions = summarize(source_logits)
    if not inspect:
        return Diagnostics(predictions, source_logits, source=source_predictions)
    is_same = not uses_batch_statistics(source)
    anchor_logits = source_logits if is_same else source(x)
    anchor = source_predictions if is_same else summarize(anchor_logits)
    tests_sorting = not is_same and logits.ndim == 2
    verdict = judge(predictions, anchor, source_predictions if tests_sorting else None)
    return Diagnostics(predictions, source_logits, anchor_logits, source_predictions, anchor, verdict)


@dataclass
class StepRecord:
    """What was observed during a step; None where nothing was."""

    update_norm: float | None = None  # relative to the norm that the trained parameters have in the source
    student_classes: Tensor | None = None  # where a teacher predicts


@contextmanager
def record_step(model: AdaptiveModel, max_update: float | None, *, inspect: bool) -> Iterator[StepRecord]:
    """Limit the optimizer's step within the context to ``max_update`` and, on inspection, measure it.

    Hooks of the optimizer do both, so that a teacher that averages students gets the limited step.
    """
    record = StepRecord()
    with ExitStack() as stack:
        if model.optimizer is not None and (inspect or max_update is not None):
            stack.enter_context(_limit_updates(model, model.optimizer, max_update, record))
        if inspect and hasattr(model, "teacher") and isinstance(student := getattr(model, "student", None), nn.Module):
            stack.enter_context(_record_classes(student, record))
        yield record


@contextmanager
def _limit_updates(
    model: AdaptiveModel, optimizer: Optimizer, max_update: float | None, record: StepRecord
) -> Iterator[None]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    originals = [original for _, original in trained_pairs(model)]
    before: list[Tensor] = []

    def keep(*_: Any) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def limit(*_: Any) -> None:
        changes = [new - old for new, old in zip(parameters, before, strict=True)]
        record.update_norm = norm = relative_norm(changes, originals)
        if max_update is not None and norm > max_update:
            for parameter, old, change in zip(parameters, before, changes, strict=True):
                parameter.copy_(old + change * (max_update / norm))

    handles = [optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(limit)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _record_classes(student: nn.Module, record: StepRecord) -> Iterator[None]:
    def keep(module: nn.Module, inputs: Any, logits: Tensor) -> None:
        record.student_classes = logits.detach().argmax(1)

    handle = student.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
