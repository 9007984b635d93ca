"""What an update did, and what may happen around it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What the last update did. The tensors are scalars without a graph.

    Attributes:
        loss: The mean loss of the batch.
        skipped: Whether nothing was updated because the loss or a gradient was not finite.
        confidence: The mean confidence over the batch: the source's if a gate compares it, else the prediction's.
            None if the method does not compute it.
        augmented: The fraction of elements whose target was averaged over views. None if the method has no views.
        selected: The fraction of elements that the method learned from. None if it selects none; 0 if it found nothing
            to learn from, and then nothing was updated.
        entropy: The mean entropy of what was learned from, where it is not that of the predictions; None otherwise.
        batch_stats: The fraction of the batch in BatchNorm's statistics, the rest being the source's; 0 without
            BatchNorm.
        scale: The fraction of the optimizer's step that was taken; below 1 for small batches with
            ``batch_stats="auto"``.
    """

    loss: Tensor
    skipped: bool
    confidence: Tensor | None = None
    augmented: Tensor | None = None
    selected: Tensor | None = None
    entropy: Tensor | None = None
    batch_stats: float = 1.0
    scale: float = 1.0

    @property
    def updated(self) -> bool:
        """Whether the weights were updated."""
        return not self.skipped and (self.selected is None or bool(self.selected > 0))
