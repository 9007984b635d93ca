"""Results with errors chosen by hand, for tests of what is computed from them."""

from typing import Any

from ctta.evaluation import BatchRecord, Result
from ctta.evaluation.metrics import ImageScore


def make_result(wrong: Any, *, size: int = 100, order: int | None = None, seed: int | None = None) -> Result:
    """Return a result whose segments have batches with these numbers of wrong images."""
    records = tuple(
        BatchRecord(segment, ImageScore(size, int(count), bins=()), 0.1, None)
        for segment, counts in enumerate(wrong)
        for count in counts
    )
    return Result(
        method="mine",
        settings={},
        source="",
        stream="",
        stream_hash="",
        domains=tuple(f"domain {number}" for number in range(len(wrong))),
        num_batches=len(records),
        reset_at_domain=False,
        labels={"order": order, "seed": seed},
        environment={},
        batches=records,
    )
