"""The bare passes of a method: what its definition asks of the network, written as a plain loop without this library.

Bare are forward passes, backward passes and steps of the optimizer, on as many images, in the same norm mode, with the
same trained parameters and the same optimizer, and the images of the views that the definition learns from. Everything
else that a step does is overhead: checks, losses, memories, statistics that follow the stream, moving averages,
restoring, and the record of the step.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.baseline import forward
from ctta.evaluation.steps import count_passes
from ctta.functional import entropy
from ctta.methods.parts.memory import EMPTY, MemoryModel
from ctta.nn.surgery import train_only_
from ctta.optim import build_optimizer
from ctta.views import DrawnViews, SplitView


@dataclass(frozen=True)
class Passes:
    """The passes of the network that the definition of a method needs for one batch.

    Attributes:
        predict: Passes of the batch without a gradient, by the running statistics.
        constant: Passes of an update without a gradient, such as those of a teacher, the source or averaged views.
        learned: Passes of an update that its backward pass goes through.
        rounds: How often an update repeats its learned passes and the backward pass; 2 for sharpness-aware steps.
        extra_backward: Further backward passes of an update, through its first learned pass.
        to_input: Passes of the batch forward and back to its images.
        views: The views that an update shows the network, in the first of its passes.
        shows_selected: Whether the views show only the images that the method selects.
        from_memory: Whether an update is computed on the images in the memory, not on the batch.
        update_every: The number of images between two updates; None for one update per batch.
        per_image: Whether every image has an update of its own, from all of its views in one pass, and a prediction.
        batch_size: The number of images in a batch.
        settings: Settings of the method under which every image counts.
    """

    predict: int = 0
    constant: int = 0
    learned: int = 0
    rounds: int = 1
    extra_backward: int = 0
    to_input: int = 0
    views: tuple[DrawnViews, ...] = ()
    shows_selected: bool = False
    from_memory: bool = False
    update_every: int | None = None
    per_image: bool = False
    batch_size: int = 100
    settings: dict[str, Any] = field(default_factory=dict)


class BarePasses:
    """The passes of a method on a plain network.

    Args:
        passes: How many there are.
        model: The method, for what it trains and with which optimizer.
        net: The network, with batch statistics.
    """

    def __init__(self, passes: Passes, model: ctta.AdaptiveModel, net: nn.Module) -> None:
        self.passes, self.model = passes, model
        self.predictor, self.learner = copy.deepcopy(net).requires_grad_(False), copy.deepcopy(net)
        use_running_statistics_(self.predictor)
        self.optimizer: torch.optim.Optimizer | None = None
        self.num_seen = 0
        self.generator = torch.Generator().manual_seed(0)
        if model.optimizer is not None:
            trained: nn.Module = model.get_submodule("student" if hasattr(model, "student") else "adapted")
            train_only_(self.learner, {name for name, value in trained.named_parameters() if value.requires_grad})
            self.optimizer = build_optimizer(model.optimizer_factory, self.learner)

    def __call__(self, x: Tensor) -> None:
        """Run the passes of one batch."""
        if self.passes.per_image:
            for image in x.split(1):
                views = torch.cat([view.augment(image) for view in self._draw()])
                self._update(views)
                forward(self.predictor, image)
            return
        for _ in range(self.passes.predict):
            forward(self.predictor, x)
        for _ in range(self.passes.to_input):
            x = x.detach().requires_grad_()
            torch.autograd.grad(self.learner(x).sum(), x)
        for _ in range(self._count_updates(len(x))):
            images = x[: self._count_remembered()] if self.passes.from_memory else x.detach()
            self._update(images, self._show(images))

    def _count_updates(self, num_images: int) -> int:
        """Return how many updates are due with a batch of this size."""
        every, before = self.passes.update_every or num_images, self.num_seen
        self.num_seen += num_images
        return self.num_seen // every - before // every

    def _count_remembered(self) -> int:
        assert isinstance(self.model, MemoryModel)
        return int((self.model.memory.labels != EMPTY).sum())

    def _draw(self) -> Iterator[SplitView]:
        for views in self.passes.views:
            for view in views.draw(self.generator):
                assert isinstance(view, SplitView)
                yield view

    def _show(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the images of the views, one view at a time."""
        if self.passes.shows_selected:
            assert self.model.last_step is not None and self.model.last_step.selected is not None
            images = images[: round(float(self.model.last_step.selected) * len(images))]
        return (view.augment(images) for view in self._draw())

    def _update(self, images: Tensor, shown: Iterable[Tensor] = ()) -> None:
        inputs = chain(shown, repeat(images))
        for _ in range(self.passes.constant):
            forward(self.learner, next(inputs))
        if self.optimizer is None:
            return
        for _ in range(self.passes.rounds):
            self.optimizer.zero_grad()
            losses = [entropy(self.learner(next(inputs))).mean() for _ in range(self.passes.learned)]
            for _ in range(self.passes.extra_backward):
                losses[-1].backward(retain_graph=True)
                self.optimizer.zero_grad()
            torch.stack(losses).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def use_running_statistics_(net: nn.Module) -> None:
    """Let BatchNorm use its running statistics."""
    for module in net.eval().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = True


def require_equal_passes(model: Callable[[Tensor], object], bare: BarePasses, x: Tensor) -> None:
    """Raise a RuntimeError unless as many images pass the network in a step of the method as in its bare passes.

    A difference of a twentieth is allowed, since a memory may still be filling.
    """
    for _ in range(2 if bare.passes.from_memory else 1):  # two batches fill a memory, and the first may cost more
        for call in (model, bare):
            call(x)
    found = []
    for call in (model, bare):
        with count_passes(type(bare.learner)) as counts:
            call(x)
        found.append(vars(counts))
    if any(abs(found[0][key] - found[1][key]) > found[1][key] / 20 for key in found[0]):
        raise RuntimeError(f"a step of {type(bare.model).__name__} has the passes {found[0]}, its row {found[1]}")
