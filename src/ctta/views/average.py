"""The protocol of a view, and the average of a model's predictions over views."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ctta.errors import ConfigError
from ctta.functional import at_least_float32
from ctta.norms import separate_statistics
from ctta.parallel import current_reducer

Model = Callable[[Tensor], Tensor]
View = Callable[[Model, Tensor], Tensor]
Average = Literal["logits", "probabilities"]


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
        views: The views of a method.
    """
    if check := getattr(views, "check", None):
        check(x)


def require_split_view(view: View, owner: str = "views_at_once above 1") -> SplitView:
    """Return the view, or raise a TypeError unless several like it can go through a model at once."""
    if not isinstance(view, SplitView):
        raise TypeError(f"{owner} needs views with augment(x) and align(logits, x), got {view!r}")
    return view


def augment_with_views(views: Sequence[View], x: Tensor, owner: str) -> Tensor:
    """Return the batch as each view shows it, one view after the other.

    Args:
        views: At least one view with ``augment(x)``. A class of views may have ``augment_together(views, x)``, which
            returns the same, faster.
        x: The batch (N, ...).
        owner: Who needs such views, for the error.

    Returns:
        Images (views N, ...).
    """
    kinds = {type(view) for view in views}
    if len(kinds) == 1 and (together := getattr(kinds.pop(), "augment_together", None)) is not None:
        images: Tensor = together(views, x)
        return images
    return torch.cat([require_split_view(view, owner).augment(x) for view in views])


def draw_views(views: Views, generator: torch.Generator) -> Sequence[View]:
    """Return the views of one step.

    Args:
        views: Fixed views, or views to draw.
        generator: Used if the views are drawn.

    Returns:
        A sequence of views.
    """
    return views.draw(generator) if isinstance(views, DrawnViews) else views


def average_views(views: Sequence[View], model: Model, x: Tensor, average: Average, views_at_once: int = 1) -> Tensor:
    """Average the model's predictions over views.

    Args:
        views: At least one view.
        model: A function from a batch to logits (N, C, ...).
        x: The batch.
        average: The mean of ``"logits"`` or of ``"probabilities"``.
        views_at_once: How many views go through the model, and are held in memory, together.

    Returns:
        The mean prediction as logits.
    """
    total: Tensor | None = None
    batch = current_reducer()
    for logits in _predict_views(batch.local_views(views), model, x, views_at_once):
        prediction = at_least_float32(logits)
        if average == "probabilities":
            prediction = prediction.softmax(1)
        # A copy, because the tensor may belong to the view.
        total = prediction.clone() if total is None else total.add_(prediction)
    if total is None:
        raise ConfigError("there are no views to average over; give at least one")
    mean = batch.sum_views(total, len(views)) / len(views)
    # The smallest normal number replaces zero, so that the log stays finite.
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if average == "probabilities" else mean


def _predict_views(views: Sequence[View], model: Model, x: Tensor, views_at_once: int) -> Iterator[Tensor]:
    """Yield the aligned logits of each view; only images of the same shape go through the model together."""
    if views_at_once == 1:
        yield from (view(model, x) for view in views)
        return
    pending: list[SplitView] = []
    images: list[Tensor] = []
    for view in map(require_split_view, views):
        image = view.augment(x)
        if images and images[0].shape != image.shape:
            yield from _predict_together(pending, images, model, x)
        pending.append(view)
        images.append(image)
        if len(pending) == views_at_once:
            yield from _predict_together(pending, images, model, x)
    if pending:
        yield from _predict_together(pending, images, model, x)


def _predict_together(pending: list[SplitView], images: list[Tensor], model: Model, x: Tensor) -> Iterator[Tensor]:
    """Yield the aligned logits of the pending views and empty both lists."""
    stack = torch.cat(images)
    images.clear()  # before the forward pass, to hold the images only once
    with separate_statistics(len(pending)):
        chunks = model(stack).chunk(len(pending))
    for view, logits in zip(pending, chunks, strict=True):
        yield view.align(logits, x)
    pending.clear()
