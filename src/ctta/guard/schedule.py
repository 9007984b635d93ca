"""When to learn, when to look, when to rest."""

import torch
from torch import Tensor, nn

from ctta.guard.detector import CALM
from ctta.validation import check_integer

COUNTS = ("unseen", "calm", "resting", "relapses", "since_alarm", "since_snapshot", "clumped", "alarmed")
SETTLED = 8  # calm looks in a row, after which looks become rarer
RELAPSE = 100  # batches; an alarm sooner than this after the last one is a relapse
MOST_DOUBLINGS = 6


class Schedule(nn.Module):
    """Counts batches and looks, in a buffer, so that a saved stream goes on in step.

    Args:
        every: learn from every so manieth batch.
        inspect_every: look at every so manieth while all is calm.
        snapshot_every: batches to learn from between snapshots.
        rest: batches without learning after an alarm; doubled at each relapse.
    """

    counts: Tensor

    def __init__(self, every: int, inspect_every: int, snapshot_every: int, rest: int) -> None:
        super().__init__()
        for name, value in (("every", every), ("inspect_every", inspect_every), ("snapshot_every", snapshot_every)):
            check_integer(name, value, 1)
        check_integer("rest", rest, 0)
        self.every, self.inspect_every, self.snapshot_every, self.rest = every, inspect_every, snapshot_every, rest
        self.register_buffer("counts", torch.zeros(len(COUNTS), dtype=torch.long))
        self["since_alarm"] = RELAPSE

    def __getitem__(self, name: str) -> int:
        return int(self.counts[COUNTS.index(name)])

    def __setitem__(self, name: str, value: int) -> None:
        self.counts[COUNTS.index(name)] = value

    def learns(self, step: int, *, also_clumped: bool) -> bool:
        return step % self.every == 0 and not self["resting"] and (also_clumped or not self["clumped"])

    def inspects(self) -> bool:
        return self["unseen"] + 1 >= (self.inspect_every if self["calm"] >= SETTLED else 1)

    def is_snapshot_due(self) -> bool:
        return self["since_snapshot"] + 1 >= self.snapshot_every

    def after_batch(self, *, learnt: bool, score: float | None, snapshot: bool) -> None:
        """Count a batch; the score is None if it was not looked at."""
        self["resting"] = max(0, self["resting"] - 1)
        self["since_alarm"] = min(RELAPSE, self["since_alarm"] + 1)
        self["since_snapshot"] = 0 if snapshot else self["since_snapshot"] + learnt
        self["unseen"] = self["unseen"] + 1 if score is None else 0
        if score is not None:
            self["calm"] = self["calm"] + 1 if score < CALM else 0

    def after_alarm(self) -> None:
        """Rest, twice as long as last time if that was not long ago."""
        again = self["since_alarm"] < RELAPSE
        self["relapses"] = min(self["relapses"] + 1, MOST_DOUBLINGS) if again else 0
        self["resting"] = self.rest * 2 ** self["relapses"]
        self["since_alarm"] = self["calm"] = 0
