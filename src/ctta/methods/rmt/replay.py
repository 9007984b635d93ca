"""Labeled source images that are shown to a network again while a stream goes on."""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.parallel import change_call, replicated
from ctta.core.validation import check_integer, check_non_negative
from ctta.errors import CheckpointError, ConfigError
from ctta.functional import at_least_float32, ema_update_, symmetric_cross_entropy
from ctta.optim import scale_rates, step_if_finite_


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


class ReplayModel(AdaptiveModel):
    """A method with a student and a teacher that also learns from labeled source images.

    A subclass calls :meth:`use_replay` in its constructor after :meth:`optimize`, and adds :meth:`replay_loss` to its
    loss.
    """

    replay: SourceReplay | None
    replay_weight: float
    decay: float
    replay_digest: Tensor
    student: nn.Module
    teacher: nn.Module

    def use_replay(self, replay: SourceReplay | None, weight: float) -> None:
        """Check and keep the hyperparameters; raise a ConfigError if a label is not a class of the network."""
        check_non_negative("replay_weight", weight)
        if replay is not None:
            if not isinstance(replay, SourceReplay):
                raise TypeError(f"replay must be a ctta.SourceReplay(images, labels), got {type(replay).__name__}")
            if (label := int(replay.labels.max())) >= (num_classes := self.count_classes()):
                raise ConfigError(f"replay has an image of class {label}, and the network has {num_classes} classes")
            self.register_buffer("replay_digest", torch.tensor(replay.digest))
        self.replay, self.replay_weight = replay, weight

    def replay_loss(self, x: Tensor) -> Tensor | float:
        """Return the weighted cross-entropy of the student on the source images of this step; 0 without any.

        With several processes it is that of the whole batch.
        """
        if self.replay is None or self.replay_weight == 0:
            return 0.0
        return self.replay_weight * self.replay.cross_entropy(self.student, self.num_steps, self.seed, x)

    def warm_up(self, num_images: int = 50_000) -> Self:
        """Let student and teacher agree on source images, before a stream begins.

        The learning rate rises linearly to its value. What is learned is part of the stream: it is saved with it, and
        :meth:`reset` and :meth:`fork` return to the state without it. With several processes, call it on each.

        Args:
            num_images: How many images to see, batch by batch; the reference has 50,000.

        Returns:
            The model itself.

        Raises:
            ConfigError: There are no source images.
        """
        if self.replay is None:
            raise ConfigError("warm_up needs source images: give replay=ctta.SourceReplay(images, labels)")
        assert self.optimizer is not None, "built by the constructor"
        num_steps = check_integer("num_images", num_images, 1) // self.replay.batch_size
        like, groups = next(self.student.parameters()), self.optimizer.param_groups
        for step in range(num_steps):
            images, _ = self.replay.draw(step, self.seed, like)
            rising = scale_rates(self.optimizer, [(step + 1) / num_steps] * len(groups))
            with torch.inference_mode(False), torch.enable_grad(), change_call(num_images=len(images)), rising:
                loss = symmetric_cross_entropy(self.student(images), self.teacher(images).detach()).mean()
                if step_if_finite_(self.optimizer, loss):
                    ema_update_(self.teacher, self.student, self.decay)
        return self

    @override
    def on_load(self, path: str | os.PathLike[str]) -> None:
        super().on_load(path)
        if self.replay is not None and int(self.replay_digest) != self.replay.digest:
            raise CheckpointError(
                f"{path} was saved with other source images, labels or batch size of replay: give those that the "
                "stream was started with"
            )
