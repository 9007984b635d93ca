"""A batch that every rank has whole, and whose views the ranks divide among themselves."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from ctta.distributed.exchange import summed
from ctta.distributed.world import rank, size
from ctta.whole_batch import WholeBatch

T = TypeVar("T")


class ShareOfViews(WholeBatch):
    """Every so many-th view is this rank's; all else each rank does for itself, and comes to the same.

    In turns and not in runs, because views that follow each other, as scales do, cost about the same.
    """

    def own_views(self, views: Sequence[T]) -> Sequence[T]:
        # A rank without view takes the first: only so does it know the shape of an answer.
        return views[rank() :: size()] or views[:1]

    def sum_of_views(self, own: Tensor, num_views: int) -> Tensor:
        return summed(own if rank() < num_views else own.zero_())
