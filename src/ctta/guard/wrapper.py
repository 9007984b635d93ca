"""A method with a seat belt."""

import os
from collections.abc import Callable
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.guard.detector import CALM, Detector
from ctta.guard.diagnostics import Look, health_of, look
from ctta.guard.remedied import OnCollapse, RemediedMethod
from ctta.guard.remedies import snapshot
from ctta.guard.schedule import Schedule
from ctta.guard.thresholds import Thresholds
from ctta.guard.untouched import untouched
from ctta.guard.validator import Admission, Door
from ctta.guard.watching import watching_step
from ctta.validation import check_choice, check_integer

LEARNT, CHOSEN = Admission(), Thresholds()
SHADOW_REPORT_EVERY = 100  # batches


class Guarded(RemediedMethod):
    """Any method, guarded: bad input kept out, health watched, a collapse noticed and undone, every event on record.

    It is itself an :class:`~ctta.AdaptiveModel`. The method inside answers and learns as ever while all is well. When
    its answers stray from the source's further than the source's own doubt explains, or lose classes that the source
    still sees, the alarm fires: the source's weights answer that batch, and ``on_collapse`` is done to the method,
    which then rests for a while and longer after each relapse. When batches come class by class, batch statistics
    are worthless; until that ends the source answers with its own statistics, and nothing is learnt.

    Args:
        model: the method; it becomes part of this, so go on with this one only.
        admission: what inputs must be like; by default learnt from the first batch.
        bad_rows: inputs that are not finite or out of range: ``"refuse"`` the batch, or answer them by the untouched
            ``"source"`` and go on with the others as if they had come alone.
        on_collapse: ``"rollback"`` to the last good snapshot, ``"reset"`` to the source, ``"soft_reset"`` (nine tenths
            of the way), ``"freeze"`` (roll back and learn no more), or None to only report.
        reset_every: reset the method after so many batches, well or not (RDumb has 1000); None never.
        every: learn from every so manieth batch only, and predict the others.
        max_update: the longest step that the optimiser may take, relative to the norm that what it trains has in the
            source; a longer one is shortened. None for any.
        shadow: learn, but answer with the untouched source; ``health`` and the audit log say what would differ.
        thresholds: from where on the alarm fires.
        inspect_every: ask the source on every so manieth batch while all is calm; every batch in doubt.
        snapshot_every: how many batches to learn from between two snapshots, which are of good health only.
        rest: batches without learning after an alarm.
        audit: a file that gets a line of JSON per event. Not saved with the stream, and not passed on to forks.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> from ctta.methods import Tent
    >>> model = Guarded(Tent(net), bad_rows="source")
    >>> logits = model(torch.rand(16, 3, 8, 8))    # predicts and adapts
    >>> model.collapse_score
    0.0
    """

    num_answers: int
    num_would_change: int

    def __init__(
        self,
        model: AdaptiveModel,
        *,
        admission: Admission = LEARNT,
        bad_rows: Literal["refuse", "source"] = "refuse",
        on_collapse: OnCollapse | None = "rollback",
        reset_every: int | None = None,
        every: int = 1,
        max_update: float | None = None,
        shadow: bool = False,
        thresholds: Thresholds = CHOSEN,
        inspect_every: int = 4,
        snapshot_every: int = 10,
        rest: int = 10,
        audit: str | os.PathLike[str] | None = None,
    ) -> None:
        schedule = Schedule(every, inspect_every, snapshot_every, rest)
        super().__init__(model, audit, on_collapse, Detector(thresholds), schedule)
        check_choice("bad_rows", bad_rows, ("refuse", "source"))
        if on_collapse is not None:
            check_choice("on_collapse", on_collapse, get_args(OnCollapse))
        if reset_every is not None:
            check_integer("reset_every", reset_every, 1)
        if max_update is not None and not max_update > 0:
            raise ValueError(f"max_update must be above 0, or None for no limit, got {max_update!r}")
        self.admission, self.bad_rows, self.thresholds, self.shadow = admission, bad_rows, thresholds, shadow
        self.reset_every, self.every, self.max_update = reset_every, every, max_update
        self.inspect_every, self.snapshot_every, self.rest = inspect_every, snapshot_every, rest
        self.door = Door(admission)
        self.register_counter("num_answers")  # in shadow
        self.register_counter("num_would_change")

    # ---- the step ----

    def check_input(self, x: Tensor) -> None:
        """Refuse what is not admitted, and note that."""
        try:
            self.door.check(x, rows=self.bad_rows == "refuse")
        except (TypeError, ValueError) as error:
            self.note("refusal", str(error))
            raise

    def adapt_step(self, x: Tensor) -> Tensor:
        self.last_step = None
        if number := int((~self.door.good_rows(x)).sum()):
            self.note("bad_rows", f"{number} of {len(x)} inputs, not finite or out of range, get the source's answer")
        answers = self._around_bad_rows(x, self._learn)
        if self.reset_every is not None and (self.num_steps + 1) % self.reset_every == 0:
            self.remedy("reset", f"every {self.reset_every} batches", "periodic_reset")
        return answers

    def predict_step(self, x: Tensor) -> Tensor:
        return self._around_bad_rows(x, self._foresee)

    def _around_bad_rows(self, x: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
        """The answers to the good rows, as if they had come alone; the others' are the untouched source's."""
        good = self.door.good_rows(x)
        if good.all():
            return answer(x)
        logits: Tensor = untouched(self.source)(x)
        if good.any():
            logits[good] = answer(x[good]).to(logits.dtype)
        return logits

    def _foresee(self, x: Tensor) -> Tensor:
        logits = self.wrapped.predict(x)
        return self._answer(x, logits, self._look(x, logits))

    def _learn(self, x: Tensor) -> Tensor:
        inspects = self.schedule.inspects()
        learns = self.schedule.learns(self.num_steps, also_clumped=self.on_collapse is None)
        # Before the step: it is the weights that answer which prove good, not those that the step makes of them.
        candidate = snapshot(self.wrapped) if learns and inspects and self.schedule.is_snapshot_due() else None
        with watching_step(self.wrapped, self.max_update, closely=inspects) as watched:
            logits = self.wrapped.adapt(x) if learns else self.wrapped.predict(x)
        self.door.learn(x)
        self.last_step = self.wrapped.last_step if learns else None
        seen = self._look(x, logits)
        answers = self._answer(x, logits, seen)
        self.health = health_of(self, seen, watched, learnt=learns, by_source=answers is not logits)
        is_good = candidate is not None and seen.verdict is not None and seen.verdict.is_good
        if candidate is not None and is_good:
            self.good = candidate
        self.schedule.after_batch(learnt=learns, score=seen.score, snapshot=is_good)
        self._draw_consequences(seen)
        return answers

    def _draw_consequences(self, seen: Look) -> None:
        if self.last_step is not None and self.last_step.skipped:
            self.num_skipped += 1
            self.note("skipped", "the loss or a gradient was not finite")
        if self.shadow and seen.source is not None:
            self.num_answers += seen.answers.classes.numel()
            self.num_would_change += int((seen.answers.classes != seen.source.classes).sum())
            if (self.num_steps + 1) % SHADOW_REPORT_EVERY == 0:
                self.note("shadow", f"{self.num_would_change} of {self.num_answers} answers would have been others")
        if seen.verdict is not None:
            clumped = self._is_clumped(seen)
            self.detector.remember(seen.verdict)
            if clumped or self.schedule["clumped"]:
                self.set_clumped(clumped)
            else:
                self.set_collapsed(seen.verdict.collapse, seen.verdict.cause)

    def _look(self, x: Tensor, logits: Tensor) -> Look:
        ask_source = self.shadow or bool(self.schedule["clumped"])
        return look(self.source, x, logits, self.detector, judge=self.schedule.inspects(), ask_source=ask_source)

    def _answer(self, x: Tensor, logits: Tensor, seen: Look) -> Tensor:
        """The method's logits, or the source's where those are not to be trusted."""
        if self.shadow:
            return at_hand(seen.source_logits)
        if self.on_collapse is None:
            return logits
        if self._is_clumped(seen):
            return at_hand(seen.source_logits)
        if seen.verdict is not None and seen.verdict.collapse >= 1:
            return at_hand(seen.anchor_logits)
        return logits

    def _is_clumped(self, seen: Look) -> bool:
        """Raised at a score of 1, and lowered only when it is calm again."""
        if seen.verdict is None:
            return bool(self.schedule["clumped"])
        return seen.verdict.clumped >= (CALM if self.schedule["clumped"] else 1)

    # ---- for users ----

    def fork(self) -> Self:
        """A fresh stream with the same settings over the same source; without an audit log, which is of one stream."""
        fresh = type(self)(self.wrapped.fork(), **self.hyperparameters)
        for name, buffer in self.named_buffers():  # built on the default device and dtype; bring them where ours are
            part, _, own = name.rpartition(".")
            if part in ("door", "detector", "schedule"):
                setattr(fresh.get_submodule(part), own, fresh.get_buffer(name).to(buffer))
        return fresh

    @property
    def collapse_score(self) -> float:
        """From 1 on the alarm stands; as of the last batch that was looked at."""
        return self.health.collapse_score

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dtype_of(self.wrapped)
        super()._apply(fn, recurse)
        if dtype_of(self.wrapped) != before:
            self.door.forget_dtype()
        return self


def dtype_of(net: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in net.parameters()), None)


def at_hand(logits: Tensor | None) -> Tensor:
    assert logits is not None, "the source was asked"
    return logits
