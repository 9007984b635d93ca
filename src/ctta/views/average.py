"""What a view is, and the average of a model's answers over views."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]
View = Callable[[Model, Tensor], Tensor]
Average = Literal["logits", "probabilities"]


@runtime_checkable
class DrawnViews(Protocol):
    """Views that are drawn anew at each step."""

    def draw(self, generator: torch.Generator) -> Sequence[View]: ...


Views = Sequence[View] | DrawnViews


def check_views(views: Views) -> None:
    """Raise unless these can serve as a method's views."""
    if isinstance(views, DrawnViews) or (isinstance(views, Sequence) and all(callable(view) for view in views)):
        return
    raise TypeError(f"views must be a sequence of views (model, x) -> logits, or have draw(generator), got {views!r}")


def check_images(x: Tensor, views: Views) -> None:
    """Let views that know which images they can show (by a method ``check``) refuse a batch."""
    if check := getattr(views, "check", None):
        check(x)


def draw_views(views: Views, generator: torch.Generator) -> Sequence[View]:
    """The views of one step."""
    return views.draw(generator) if isinstance(views, DrawnViews) else views


def average_views(views: Sequence[View], model: Model, x: Tensor, average: Average) -> Tensor:
    """The mean answer over the views, as logits; one view in memory at a time."""
    total: Tensor | None = None
    for view in views:
        answer = view(model, x)
        if average == "probabilities":
            answer = answer.softmax(1)
        total = answer if total is None else total + answer
    if total is None:
        raise ValueError("there are no views to average over")
    mean = total / len(views)
    # The smallest normal number stands in for zero, so that the log stays finite.
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if average == "probabilities" else mean
