"""The protocol of a view, and the average of a model's predictions over views."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ctta.core.parallel import change_call, current_reducer
from ctta.errors import ConfigError
from ctta.functional import at_least_float32, entropy
from ctta.nn import has_running_statistics, uses_batch_statistics

Model = Callable[[Tensor], Tensor]
View = Callable[[Model, Tensor], Tensor]
Average = Literal["logits", "probabilities"]
#: How much each view counts in an average: all the same, or those more of which the model is surer.
ViewWeights = Literal["equal", "confidence"]

#: How many views go through a model together; ``"auto"`` to let :func:`choose_views_at_once` decide.
ViewsAtOnce = int | Literal["auto"]

#: The largest number of input values that go through a model together under ``"auto"``, 42 images of 32x32. Measured on
#: a CPU (docs/results/performance.md): larger stacks are slower than views one by one.
MAX_STACKED_VALUES = 2**17
#: The largest number of values of the images of views that are augmented together, which bounds the memory for them. On
#: a CPU larger ones leave its cache; an accelerator waits for each kernel to be started.
MAX_AUGMENTED_VALUES, MAX_AUGMENTED_VALUES_ON_CPU = 2**21, 2**16
#: A view with twice the entropy of another counts 2 ** 4 times less. Chosen by benchmarks/choose/streets_settings.py.
ENTROPY_POWER = 4.0
#: The smallest entropy, as a fraction of the largest possible one, that makes a difference: predictions are certain.
_MIN_ENTROPY = 1e-3


@runtime_checkable
class DrawnViews(Protocol):
    """Views that are drawn anew at each step."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Sequence[View]:
        """Draw the views of one step.

        Args:
            generator: The source of all randomness; equal generators give equal views.

        Returns:
            The views.
        """
        ...


Views = Sequence[View] | DrawnViews


@runtime_checkable
class SplitView(Protocol):
    """A view made of two halves, so that several views can go through the model together."""

    def __call__(self, model: Model, x: Tensor) -> Tensor:
        """Return the model's logits for this view of the batch, aligned with the batch."""
        return self.align(model(self.augment(x)), x)

    @abstractmethod
    def augment(self, x: Tensor) -> Tensor:
        """Return the batch as the model sees it in this view.

        Args:
            x: The original batch.

        Returns:
            The transformed batch, with as many rows.
        """
        ...

    @abstractmethod
    def align(self, logits: Tensor, x: Tensor) -> Tensor:
        """Undo on dense logits what :meth:`augment` did to the positions of pixels.

        Args:
            logits: The model's output for the transformed batch.
            x: The original batch.

        Returns:
            The logits of each pixel where it is in ``x``.
        """
        ...


@runtime_checkable
class FittingView(SplitView, Protocol):
    """A view that changes the size of images, and finds a size that the model takes if it refuses the first."""

    @abstractmethod
    def recall(self, model: Model, x: Tensor) -> SplitView:
        """Return what :meth:`fit` found for a batch of this size earlier; the view itself if it was not needed."""
        ...

    @abstractmethod
    def fit(self, model: Model, x: Tensor, error: Exception) -> SplitView:
        """Return this view at the nearest size that a model takes after it has failed with an error.

        If there is none, return the view itself, and add a note with its name to the error, which should be raised.
        """
        ...


def check_views(*arguments: Views) -> None:
    """Raise a TypeError unless a method can average over these views.

    Args:
        *arguments: The argument ``views`` of a method, or each of several.
    """
    for views in arguments:
        if isinstance(views, DrawnViews) or (isinstance(views, Sequence) and all(callable(view) for view in views)):
            continue
        raise TypeError(
            f"views must be a sequence of views (model, x) -> logits, or have draw(generator), got {views!r}"
        )


def check_images(x: Tensor, views: Views) -> None:
    """Let views with a method ``check`` reject a batch that they cannot transform.

    Args:
        x: The batch.
        views: The views of a method: an object that draws them, or a sequence, whose first view speaks for all.
    """
    speaker = views[0] if isinstance(views, Sequence) and views else views
    if check := getattr(speaker, "check", None):
        check(x)


def require_split_view(view: View, owner: str = "views_at_once above 1") -> SplitView:
    """Return the view, or raise a TypeError unless several like it can go through a model at once."""
    if not isinstance(view, SplitView):
        raise TypeError(f"{owner} needs views with augment(x) and align(logits, x), got {view!r}")
    return view


def augment_with_views(views: Sequence[View], x: Tensor, owner: str = "views_at_once above 1") -> Tensor:
    """Return the batch (N, ...) as each view shows it, one view after the other (views N, ...).

    A class of views may have ``augment_together(views, x)``, which returns the same, faster. Errors name the owner.
    """
    kinds = {type(view) for view in views}
    if len(kinds) == 1 and (together := _find_augment_together(kinds.pop())) is not None:
        return together(views, x)
    return torch.cat([require_split_view(view, owner).augment(x) for view in views])


def _find_augment_together(kind: type) -> Callable[[Sequence[View], Tensor], Tensor] | None:
    """Return the function of a class that augments several of its views; a subclass may have changed one view's."""
    return getattr(kind, "augment_together", None) if "augment_together" in vars(kind) else None


def _group_views(views: Sequence[View], x: Tensor) -> Iterator[Sequence[View]]:
    """Yield the views in order, in groups that are augmented together."""
    for kind, run in groupby(views, type):
        alike = list(run)
        limit = MAX_AUGMENTED_VALUES_ON_CPU if x.is_cpu else MAX_AUGMENTED_VALUES
        size = 1 if _find_augment_together(kind) is None else max(1, limit // max(1, x.numel()))
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def draw_views(views: Views, generator: torch.Generator) -> Sequence[View]:
    """Return the views of one step.

    Args:
        views: Fixed views, or views to draw.
        generator: Used if the views are drawn.

    Returns:
        A sequence of views.
    """
    return views.draw(generator) if isinstance(views, DrawnViews) else views


def choose_views_at_once(setting: ViewsAtOnce, views: Sequence[View], net: nn.Module, x: Tensor) -> int:
    """Return how many views of a batch go through a network together.

    Under ``"auto"`` these are as many as keep the stack small, so that memory does not grow much. Views that are not
    split into two halves, layers without running statistics, and batches of several images whose statistics would have
    to be separated are left one by one.

    Args:
        setting: The hyperparameter ``views_at_once``.
        views: The views of a step.
        net: The network.
        x: The batch.

    Returns:
        The number, at least 1.
    """
    if setting != "auto":
        return setting
    is_simple = len(x) == 1 or not uses_batch_statistics(net)
    if not is_simple or not has_running_statistics(net) or not all(isinstance(view, SplitView) for view in views):
        return 1
    return max(1, min(len(views), MAX_STACKED_VALUES // x.numel()))


def average_views(
    views: Sequence[View],
    model: Model,
    x: Tensor,
    average: Average,
    views_at_once: int = 1,
    weights: ViewWeights = "equal",
) -> Tensor:
    """Average the model's predictions over views.

    Args:
        views: At least one view.
        model: A function from a batch to logits (N, C, ...).
        x: The batch.
        average: The mean of ``"logits"`` or of ``"probabilities"``.
        views_at_once: How many views go through the model, and are held in memory, together.
        weights: ``"equal"``, or by ``"confidence"``: for each image the weight of a view decreases with the entropy of
            its predictions, averaged over the pixels if there are any.

    Returns:
        The mean prediction as logits.
    """
    total: Tensor | None = None
    total_weight: Tensor | None = None
    batch = current_reducer()
    for logits in _predict_views(batch.local_views(views), model, x, views_at_once):
        prediction = at_least_float32(logits)
        weight = None if weights == "equal" else weigh_by_confidence(prediction)
        if average == "probabilities":
            prediction = prediction.softmax(1)
        if weight is not None:
            prediction = prediction * weight
            total_weight = weight if total_weight is None else total_weight.add_(weight)
        # A copy, because the tensor may belong to the view.
        total = prediction.clone() if total is None else total.add_(prediction)
    if total is None:
        raise ConfigError("there are no views to average over; give at least one")
    divisor = len(views) if total_weight is None else batch.sum_views(total_weight, len(views))
    mean = batch.sum_views(total, len(views)) / divisor
    # The smallest normal number replaces zero, so that the log stays finite.
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if average == "probabilities" else mean


def weigh_by_confidence(logits: Tensor, power: float = ENTROPY_POWER) -> Tensor:
    """Return how much the predictions of a view count for each image in an average by confidence (N, 1, ...).

    The weights, to be divided by their sum over the views, are the mean entropy to minus ``power``.
    """
    mean = entropy(logits).flatten(1).mean(1) if logits.ndim > 2 else entropy(logits)
    relative = mean / math.log(max(logits.shape[1], 2))
    return relative.clamp_min(_MIN_ENTROPY).pow(-power).view(-1, *[1] * (logits.ndim - 1))


def _predict_views(views: Sequence[View], model: Model, x: Tensor, views_at_once: int) -> Iterator[Tensor]:
    """Yield the aligned logits of each view; only images of the same shape go through the model together."""
    pending: list[SplitView] = []
    images: list[Tensor] = []
    for group in _group_views(views, x):
        if views_at_once == 1 and len(group) == 1:
            yield group[0](model, x)
            continue
        split = [_recall(require_split_view(view), model, x) for view in group]
        shown = [split[0].augment(x)] if len(group) == 1 else augment_with_views(split, x).chunk(len(group))
        for view, image in zip(split, shown, strict=True):
            if views_at_once == 1:
                yield view.align(model(image), x)
                continue
            if images and images[0].shape != image.shape:
                yield from _predict_together(pending, images, model, x)
            pending.append(view)
            images.append(image)
            if len(pending) == views_at_once:
                yield from _predict_together(pending, images, model, x)
    if pending:
        yield from _predict_together(pending, images, model, x)


def _recall(view: SplitView, model: Model, x: Tensor) -> SplitView:
    return view.recall(model, x) if isinstance(view, FittingView) else view


def _predict_together(pending: list[SplitView], images: list[Tensor], model: Model, x: Tensor) -> Iterator[Tensor]:
    """Yield the aligned logits of the pending views and empty both lists."""
    views, stack = tuple(pending), torch.cat(images)
    pending.clear()
    images.clear()  # before the forward pass, to hold the images only once
    try:
        with change_call(num_parts=len(views)):
            chunks = model(stack).chunk(len(views))
    except Exception as error:
        fitted = tuple(view.fit(model, x, error) if isinstance(view, FittingView) else view for view in views)
        if fitted == views:
            raise
        yield from _predict_views(fitted, model, x, len(fitted))
        return
    for view, logits in zip(views, chunks, strict=True):
        yield view.align(logits, x)
