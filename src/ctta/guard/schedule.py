"""When a guarded method adapts, is inspected, is copied and pauses."""

import torch
from torch import Tensor, nn

from ctta.core.validation import check_integer
from ctta.guard.detector import HEALTHY_SCORE

MIN_HEALTHY_INSPECTIONS = 8  # in a row, after which inspections become rarer
RELAPSE = 100  # batches; an alarm sooner than this after the last one is a relapse
MAX_DOUBLINGS = 6  # of the cooldown

# Whether the stream is sorted by class: not; yes, judged by the last batches; or only the last batch had few classes.
NOT_SORTED, SORTED, FEW_CLASSES = 0, 1, 2


class _Count:
    """An integer attribute that is stored in the buffer ``counts``."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __get__(self, schedule: "Schedule | None", owner: type) -> int:
        if schedule is None:
            raise AttributeError("only instances count")
        return int(schedule.counts[self.position])

    def __set__(self, schedule: "Schedule", value: int) -> None:
        schedule.counts[self.position] = value


class Schedule(nn.Module):
    """Count batches and inspections in a buffer, so that a saved stream resumes in step.

    Args:
        adapt_every: Adapt to every n-th batch.
        inspect_every: Inspect every n-th batch while the stream is healthy.
        snapshot_every: Batches to adapt to between two snapshots.
        cooldown: Batches without adaptation after an alarm; doubled at each relapse.
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

    def __init__(self, adapt_every: int, inspect_every: int, snapshot_every: int, cooldown: int) -> None:
        super().__init__()
        check_integer("adapt_every", adapt_every, 1)
        check_integer("inspect_every", inspect_every, 1)
        check_integer("snapshot_every", snapshot_every, 1)
        check_integer("cooldown", cooldown, 0)
        self.adapt_every, self.inspect_every, self.snapshot_every = adapt_every, inspect_every, snapshot_every
        self.cooldown = cooldown
        self.register_buffer("counts", torch.zeros(8, dtype=torch.long))
        self.num_since_alarm = RELAPSE

    @property
    def is_sorted(self) -> bool:
        """Whether batches arrive sorted by class."""
        return self.sorting == SORTED

    def should_adapt(self, step: int, *, even_if_sorted: bool) -> bool:
        """Return whether to adapt to the batch of this step."""
        return step % self.adapt_every == 0 and not self.num_cooldown and (even_if_sorted or not self.is_sorted)

    def should_inspect(self) -> bool:
        """Return whether to inspect the next batch."""
        is_settled = self.num_healthy >= MIN_HEALTHY_INSPECTIONS
        return self.num_uninspected + 1 >= (self.inspect_every if is_settled else 1)

    def should_snapshot(self) -> bool:
        """Return whether a snapshot is due with the next batch that is adapted to."""
        return self.num_since_snapshot + 1 >= self.snapshot_every

    def count_batch_(self, *, adapted: bool, score: float | None, snapshot: bool) -> None:
        """Count a batch; its score is None if it was not inspected."""
        was_paused, self.num_cooldown = self.num_cooldown > 0, max(0, self.num_cooldown - 1)
        self.num_since_alarm = min(RELAPSE, self.num_since_alarm + 1)
        self.num_since_snapshot = 0 if snapshot else self.num_since_snapshot + adapted
        self.num_uninspected = self.num_uninspected + 1 if score is None else 0
        if score is not None:  # in a pause, health says nothing about how the method will learn
            self.num_healthy = self.num_healthy + 1 if score < HEALTHY_SCORE and not was_paused else 0

    def inspect_next_(self) -> None:
        """Let the next batch be inspected."""
        self.num_uninspected = self.inspect_every

    def count_alarm_(self) -> None:
        """Start a cooldown, twice as long as the last one if that was recent."""
        is_relapse = self.num_since_alarm < RELAPSE
        self.num_relapses = min(self.num_relapses + 1, MAX_DOUBLINGS) if is_relapse else 0
        self.num_cooldown = self.cooldown * 2**self.num_relapses
        self.num_since_alarm = self.num_healthy = 0
