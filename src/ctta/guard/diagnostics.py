"""One look at a batch: the method's answers beside the source's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctta.guard.around import AroundMethod
from ctta.guard.detector import Detector, Verdict
from ctta.guard.health import Answers, Health, disagreement, relative_norm, summarise, trained_pairs
from ctta.guard.untouched import untouched
from ctta.guard.watching import Watched
from ctta.norms import uses_batch_statistics


@dataclass(frozen=True)
class Look:
    """What is known of a batch; the source's part only where it was asked."""

    answers: Answers
    source_logits: Tensor | None = None
    anchor_logits: Tensor | None = None
    source: Answers | None = None
    anchor: Answers | None = None
    verdict: Verdict | None = None

    @property
    def score(self) -> float | None:
        """None if the batch was not judged."""
        return None if self.verdict is None else self.verdict.score

    def signals(self) -> dict[str, Any]:
        """As fields of :class:`~ctta.guard.Health`."""
        found: dict[str, Any] = {}
        for prefix, part in (("", self.answers), ("source_", self.source), ("anchor_", self.anchor)):
            if part is not None:
                found |= {
                    f"{prefix}{name}": getattr(part, name)
                    for name in ("confidence", "entropy", "mean_prediction_entropy")
                }
                if prefix:
                    found[f"{prefix}disagreement"] = disagreement(self.answers, part)
        return found | ({"clumping": self.verdict.clumping} if self.verdict else {})


@torch.no_grad()
def look(source: nn.Module, x: Tensor, logits: Tensor, detector: Detector, *, judge: bool, ask_source: bool) -> Look:
    """Look at a method's logits; judge them if asked, and where they are not finite in any case.

    Args:
        source: of the method; its BatchNorms use the method's statistics.
        x: the batch.
        logits: the method's.
        detector: judges them.
        judge: whether this batch is to be inspected.
        ask_source: ask the source also where nothing is judged.
    """
    answers = summarise(logits)
    judge = judge or not answers.is_finite
    if not judge and not ask_source:
        return Look(answers)
    source_logits = untouched(source)(x)
    of_source = summarise(source_logits)
    if not judge:
        return Look(answers, source_logits, source=of_source)
    alike = not uses_batch_statistics(source)
    anchor_logits = source_logits if alike else source(x)
    anchor = of_source if alike else summarise(anchor_logits)
    clumps_matter = not alike and logits.ndim == 2
    verdict = detector.judge(answers, anchor, of_source if clumps_matter else None)
    return Look(answers, source_logits, anchor_logits, of_source, anchor, verdict)


def health_of(model: AroundMethod, seen: Look, watched: Watched, *, learnt: bool, by_source: bool) -> Health:
    """What a batch showed, in numbers."""
    pairs = trained_pairs(model.wrapped) if seen.verdict else []
    moved = relative_norm([ours - theirs for ours, theirs in pairs], [theirs for _, theirs in pairs]) if pairs else None
    heard = watched.student_classes
    return Health(
        step=model.num_steps,
        **seen.signals(),
        student_disagreement=None if heard is None else float((heard != seen.answers.classes).double().mean()),
        distance_to_source=moved,
        update_norm=watched.update_norm,
        skipped=model.last_step.skipped if model.last_step else None,
        adapted=learnt,
        answered_by_source=by_source,
        collapse_score=seen.verdict.score if seen.verdict else model.health.collapse_score,
    )
