"""What a guard does about verdicts: when it adapts, inspects and pauses, and the ways back to an earlier state."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ctta.core.model import AdaptiveModel
from ctta.core.state import CpuState
from ctta.core.transaction import untrained_parameters
from ctta.core.validation import check_integer
from ctta.guard.detector import HEALTHY_SCORE
from ctta.guard.diagnostics import Diagnostics, pair_with_source
from ctta.guard.estimate import GainEstimate
from ctta.guard.health import EventKind

SOFT_RESET_WEIGHT = 0.9  # of the source in the average that a soft reset computes
MIN_HEALTHY_INSPECTIONS = 8  # in a row, after which inspections become rarer
RELAPSE_BATCHES = 100  # an alarm sooner than this after the last one is a relapse
MAX_DOUBLINGS = 6  # of the cooldown

_KINDS = {kind.value: kind for kind in EventKind}

# Whether the stream is sorted by class: not; yes, judged by the last batches; or only the last batch had few classes.
NOT_SORTED, SORTED, FEW_CLASSES = 0, 1, 2


class Reaction(NamedTuple):
    """What to do about a verdict."""

    kind: EventKind
    cause: str
    remedy: str | None = None


class _Count:
    """An integer attribute that is stored in the buffer ``counts``."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __get__(self, schedule: "Schedule", owner: type) -> int:
        return int(schedule.counts[self.position])

    def __set__(self, schedule: "Schedule", value: int) -> None:
        schedule.counts[self.position] = value


class Schedule(CpuState):
    """Count batches, inspections and alarms in a buffer, so that a saved stream resumes in step.

    The arguments are those of :class:`~ctta.guard.Guarded`.
    """

    counts: Tensor
    num_uninspected = _Count(0)
    num_healthy = _Count(1)  # inspections in a row
    num_cooldown = _Count(2)  # batches left without adaptation
    num_relapses = _Count(3)
    num_since_alarm = _Count(4)
    num_since_snapshot = _Count(5)
    sorting = _Count(6)  # one of the values above
    is_collapsed = _Count(7)  # 1 if the last inspection found a collapse
    is_standby = _Count(8)  # 1 while the source answers because the estimate of gain shows harm

    def __init__(
        self,
        adapt_every: int,
        inspect_every: int,
        snapshot_every: int,
        cooldown: int,
        on_collapse: str | None = "rollback",
    ) -> None:
        super().__init__()
        self.adapt_every = check_integer("adapt_every", adapt_every, 1)
        self.inspect_every = check_integer("inspect_every", inspect_every, 1)
        self.snapshot_every = check_integer("snapshot_every", snapshot_every, 1)
        self.cooldown = check_integer("cooldown", cooldown, 0)
        self.on_collapse = on_collapse
        self.register_buffer("counts", torch.zeros(9, dtype=torch.long))
        self.num_since_alarm = RELAPSE_BATCHES

    @property
    def is_sorted(self) -> bool:
        """Whether batches arrive sorted by class."""
        return self.sorting == SORTED

    def judge_sorted(self, found: Diagnostics) -> bool:
        """Return whether the stream counts as sorted with a batch: from a score of 1 on, until it is healthy again."""
        if found.verdict is None:
            return self.is_sorted
        return found.verdict.sorting >= (HEALTHY_SCORE if self.is_sorted else 1)

    def should_adapt(self, step: int, few_classes: float) -> bool:
        """Return whether to adapt to the batch of this step, of which the score says how few classes it has."""
        spoils = self.on_collapse is not None and (self.is_sorted or self.is_standby or few_classes >= 1)
        return step % self.adapt_every == 0 and not self.num_cooldown and not spoils

    def should_inspect(self, step: int) -> bool:
        """Return whether to inspect the batch of this step; never between two updates, where nothing can collapse."""
        is_settled = self.num_healthy >= MIN_HEALTHY_INSPECTIONS and not self.is_standby
        return step % self.adapt_every == 0 and self.num_uninspected + 1 >= (self.inspect_every if is_settled else 1)

    def should_snapshot(self) -> bool:
        """Return whether a snapshot is due with the next batch that is adapted to."""
        return self.num_since_snapshot + 1 >= self.snapshot_every

    def count_batch_(self, *, adapted: bool, score: float | None, snapshot: bool) -> None:
        """Count a batch; its score is None if it was not inspected."""
        was_paused, self.num_cooldown = self.num_cooldown > 0, max(0, self.num_cooldown - 1)
        self.num_since_alarm = min(RELAPSE_BATCHES, self.num_since_alarm + 1)
        self.num_since_snapshot = 0 if snapshot else self.num_since_snapshot + adapted
        self.num_uninspected = self.num_uninspected + 1 if score is None else 0
        if score is not None:  # in a pause, health says nothing about how the method will learn
            self.num_healthy = self.num_healthy + 1 if score < HEALTHY_SCORE and not was_paused else 0

    def inspect_next_(self) -> None:
        """Let the next batch be inspected."""
        self.num_uninspected = self.inspect_every

    def count_alarm_(self) -> None:
        """Start a cooldown, twice as long as the last one if that was recent."""
        is_relapse = self.num_since_alarm < RELAPSE_BATCHES
        self.num_relapses = min(self.num_relapses + 1, MAX_DOUBLINGS) if is_relapse else 0
        self.num_cooldown = self.cooldown * 2**self.num_relapses
        self.num_since_alarm = self.num_healthy = 0

    def react_to_estimate_(
        self, found: Sequence[GainEstimate], *, is_cautious: bool, ignore_harm: bool, on_harm: str | None
    ) -> Reaction | None:
        """Let the source answer from the batch on that shows harm, until the method would gain again.

        Args:
            found: The estimate, and that of the newest images; none yet for too few.
            is_cautious: Whether harm that is likely suffices; it must be certain otherwise.
            ignore_harm: Whether harm is dealt with otherwise.
            on_harm: The remedy for harm that is certain; None for that of a collapse, which harm that is likely gets.
        """
        if self.is_standby:
            if not found or found[0].gain <= 0:
                return None
            self.is_standby = 0
            return Reaction(EventKind.RECOVERY, f"without the source, {found[0]}")
        is_certain = any(each.is_harmful for each in found)
        on_harm = on_harm if is_certain else None
        is_suspected = (is_certain or (is_cautious and any(each.suggests_harm for each in found))) and not ignore_harm
        if not is_suspected or self.on_collapse is None is on_harm:
            return None
        if self.on_collapse is not None:
            self.is_standby, self.num_healthy = 1, 0
        return Reaction(EventKind.HARM, str(found[0]), on_harm or self.on_collapse)

    def react_(self, found: Diagnostics) -> Reaction | None:
        """Take an inspected batch into account, and return what is to be done about it; None for nothing."""
        if found.verdict is None:
            return None
        was, reaction = self.sorting, None
        is_sorted, has_few_classes = self.judge_sorted(found), found.few_classes >= 1
        self.sorting = SORTED if is_sorted else FEW_CLASSES if has_few_classes else NOT_SORTED
        if is_sorted and was != SORTED:
            remedy = None if self.on_collapse is None else "rollback"
            reaction = Reaction(EventKind.SORTED_STREAM, "batches are sorted by class", remedy)
        elif was == SORTED and not is_sorted:
            reaction = Reaction(EventKind.RECOVERY, "batches are no longer sorted by class")
        elif has_few_classes and was == NOT_SORTED:  # reported once, as the next may have few too
            reaction = Reaction(EventKind.SORTED_STREAM, "the batch has few classes")
        elif not is_sorted and not has_few_classes:
            reaction = self._react_to_collapse_(found.verdict.collapse, found.verdict.cause)
        return reaction

    def _react_to_collapse_(self, score: float, cause: str) -> Reaction | None:
        was_collapsed, self.is_collapsed = self.is_collapsed, int(score >= 1)
        cause = f"collapse score {score:.2f}: {cause}"
        if score < 1 or (self.on_collapse is None and was_collapsed):
            return None
        if self.on_collapse is None:
            return Reaction(EventKind.COLLAPSE, cause)
        remedy = self.on_collapse
        if self.num_cooldown:  # nothing was adapted since the last alarm, so its remedy did not help
            remedy, cause = "reset", f"{cause}, also after the last remedy"
        self.count_alarm_()
        return Reaction(_KINDS.get(remedy, EventKind.REMEDY), cause, remedy)


@torch.inference_mode(False)
def take_snapshot(model: AdaptiveModel) -> AdaptiveModel:
    """Return a copy of a stream that shares what never changes: the source, and the student's untrained parameters."""
    shared = {id(tensor): tensor for tensor in untrained_parameters(model)}
    snapshot = copy.deepcopy(model, {id(model.source): model.source, **shared})
    snapshot.last_step = None
    return snapshot


def roll_back(model: AdaptiveModel, snapshot: AdaptiveModel) -> AdaptiveModel:
    """Return a stream with the snapshot's networks and optimizer, and the current counters."""
    restored = take_snapshot(snapshot)
    restored._compilation, restored._activation_plan = model._compilation, model._activation_plan
    for name, value in model.counters.items():
        setattr(restored, name, value)
    return restored


@torch.no_grad()
def soft_reset(model: AdaptiveModel, snapshot: AdaptiveModel) -> AdaptiveModel:
    """Return a stream whose networks are most of the way back to the source; the optimizer keeps its momenta."""
    pulled_model = roll_back(model, model)
    for parameter, original in pair_with_source(pulled_model):
        if original.shape == parameter.shape:
            pulled = parameter.lerp(original, SOFT_RESET_WEIGHT)
            parameter.copy_(torch.where(parameter.isfinite(), pulled, original))
    return pulled_model


def reset(model: AdaptiveModel, snapshot: AdaptiveModel) -> AdaptiveModel:
    """Return a stream that starts at the source, with a new optimizer."""
    return model.fork()


#: Functions of the method and its last good snapshot that return the model to continue with, by the name that
#: ``on_collapse`` takes. The guard freezes after a "freeze".
REMEDIES: dict[str, Callable[[AdaptiveModel, AdaptiveModel], AdaptiveModel]] = {
    "rollback": roll_back,
    "reset": reset,
    "soft_reset": soft_reset,
    "freeze": roll_back,
}
