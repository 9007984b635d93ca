"""Labeled source images that are shown to a network again while a stream goes on."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.parallel import change_call, replicated
from ctta.core.validation import check_integer
from ctta.errors import ConfigError
from ctta.functional import at_least_float32


@dataclass(frozen=True, eq=False)
class SourceReplay:
    """Source images and their classes, of which a method takes a random batch per step.

    Each image is shown once before one is shown again. Which images a step gets depends on the seed and on the number
    of the step alone, so a stream can be resumed. A checkpoint does not hold the images, only a hash of them: give the
    same ones to :func:`ctta.load`. On several processes all of them hold the images, and compute on the same batch.

    Args:
        images: The images (M, ...), as the network takes them, or as bytes, which are divided by 255.
        labels: The class of each image (M).
        batch_size: The number of images per step; of the last few of them, in each pass, too few are left out.

    >>> replay = SourceReplay(torch.rand(100, 3, 8, 8), torch.arange(100) % 10, batch_size=20)
    >>> replay
    SourceReplay(100 images, batch_size=20)
    """

    images: Tensor
    labels: Tensor
    batch_size: int = 200

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1)
        if not isinstance(self.images, Tensor) or not isinstance(self.labels, Tensor):
            raise TypeError("SourceReplay takes tensors: images (M, ...) and labels (M)")
        if self.labels.ndim != 1 or len(self.labels) != len(self.images) or len(self.images) == 0:
            shapes = f"{tuple(self.images.shape)} and {tuple(self.labels.shape)}"
            raise ConfigError(f"expected one label per source image, and at least one image, got shapes {shapes}")
        if not (self.images.is_floating_point() or self.images.dtype == torch.uint8):
            raise ConfigError(f"source images are floating-point numbers or bytes, got {self.images.dtype}")
        if self.labels.is_floating_point() or int(self.labels.min()) < 0:
            raise ConfigError("labels of source images are classes 0, 1, ...: expected integers of at least 0")

    @override
    def __repr__(self) -> str:
        return f"SourceReplay({len(self.images)} images, batch_size={self.batch_size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same object, since nothing changes it."""
        return self

    @cached_property
    def digest(self) -> int:
        """A hash of images, labels and batch size, of 63 bits."""
        state = hashlib.blake2b(
            f"{tuple(self.images.shape)} {self.images.dtype} {self.batch_size}".encode(), digest_size=8
        )
        for tensor in (self.images, self.labels.long()):
            for part in tensor.detach().cpu().contiguous().split(1000):
                state.update(part.flatten().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(state.digest()) >> 1

    def draw(self, step: int, seed: int, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the batch of a step.

        Args:
            step: Its number, from 0.
            seed: The seed of the order.
            like: A tensor whose dtype and device the images get.

        Returns:
            Images and labels.
        """
        per_pass = max(1, len(self.images) // self.batch_size)
        number, position = divmod(step, per_pass)
        digest = hashlib.blake2b(f"{seed}/{number}/replay".encode(), digest_size=8).digest()
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(int.from_bytes(digest)))
        chosen = order[position * self.batch_size :][: self.batch_size].to(self.images.device)
        images, labels = self.images[chosen], self.labels[chosen.to(self.labels.device)].long()
        like = torch.empty(0) if like is None else like
        scaled = images.to(like) / 255 if images.dtype == torch.uint8 else images.to(like)
        return scaled, labels.to(like.device)

    def cross_entropy(self, net: nn.Module, step: int, seed: int, like: Tensor) -> Tensor:
        """Return the mean cross-entropy of a network on the batch of a step.

        Args:
            net: The network.
            step: The number of the step.
            seed: The seed of the order.
            like: A tensor whose dtype and device the images get.

        Returns:
            The loss, a scalar; it is that of the whole batch on every process.
        """
        images, labels = self.draw(step, seed, like)
        with replicated(), change_call(num_images=len(images)):
            logits = net(images)
        return F.cross_entropy(at_least_float32(logits), labels)
