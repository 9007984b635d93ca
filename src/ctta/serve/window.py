"""The last images of a stream, so that a single one has a batch to be normalised with."""

import torch
from torch import Tensor

# Chosen by benchmarks/choose_window.py; see docs/serve.md.
WINDOW = 16  # images
SHARE = 0.5  # of their statistics in BatchNorm's
UPDATE_EVERY = 4  # images
WARM = 4  # images from which on their statistics are better than the source's


class Window:
    """The newest images of one stream, oldest first, at most ``size`` of them.

    Args:
        size: how many; 0 keeps none, and every request is a batch by itself.
        every: images between two updates; a request that fills the window by itself always is one.
    """

    def __init__(self, size: int, every: int) -> None:
        self.size, self.every = size, every
        self.images: Tensor | None = None
        self.num_since_update = 0

    def batch(self, x: Tensor) -> Tensor:
        """The new images behind as many old ones as there is room for; old ones of another shape are left out."""
        room = self.size - len(x)
        if self.images is None or room <= 0 or self.images.shape[1:] != x.shape[1:]:
            return x
        return torch.cat([self.images[-room:].to(x), x])

    def is_warm(self, batch: Tensor) -> bool:
        """Whether a batch that this window gave has enough images to be normalised by its own statistics."""
        return len(batch) >= min(WARM, self.size)

    def is_update_due(self, num_new: int) -> bool:
        """Whether the stream should learn from its window once so many have come."""
        return self.num_since_update + num_new >= self.every

    def push(self, x: Tensor, *, updated: bool) -> None:
        """Remember the new images, and when there was an update."""
        self.num_since_update = 0 if updated else self.num_since_update + len(x)
        if self.size:
            self.images = self.batch(x)[-self.size :].clone(memory_format=torch.contiguous_format)

    def clear(self) -> None:
        """As new."""
        self.images, self.num_since_update = None, 0
