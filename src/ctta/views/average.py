"""What a view is, and the average of a model's answers over views."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ctta.functional import at_least_float32
from ctta.norms import separate_statistics
from ctta.parallel import current_reducer

Model = Callable[[Tensor], Tensor]
View = Callable[[Model, Tensor], Tensor]
Average = Literal["logits", "probabilities"]


@runtime_checkable
class DrawnViews(Protocol):
    """Views that are drawn anew at each step."""

    def draw(self, generator: torch.Generator) -> Sequence[View]: ...


Views = Sequence[View] | DrawnViews


@runtime_checkable
class SplitView(Protocol):
    """A view whose call is ``align(model(augment(x)), x)``, so that several can go through the model together."""

    def augment(self, x: Tensor) -> Tensor: ...

    def align(self, logits: Tensor, x: Tensor) -> Tensor: ...


def check_views(views: Views) -> None:
    """Raise unless these can serve as a method's views."""
    if isinstance(views, DrawnViews) or (isinstance(views, Sequence) and all(callable(view) for view in views)):
        return
    raise TypeError(f"views must be a sequence of views (model, x) -> logits, or have draw(generator), got {views!r}")


def check_images(x: Tensor, views: Views) -> None:
    """Let views that know which images they can show (by a method ``check``) refuse a batch."""
    if check := getattr(views, "check", None):
        check(x)


def require_split_view(view: View) -> SplitView:
    """The view itself, if several like it can go through a model at once."""
    if not isinstance(view, SplitView):
        raise TypeError(f"views_at_once above 1 needs views with augment(x) and align(logits, x), got {view!r}")
    return view


def draw_views(views: Views, generator: torch.Generator) -> Sequence[View]:
    """The views of one step."""
    return views.draw(generator) if isinstance(views, DrawnViews) else views


def average_views(views: Sequence[View], model: Model, x: Tensor, average: Average, views_at_once: int = 1) -> Tensor:
    """The mean answer over the views, as logits; so many views in memory at a time."""
    total: Tensor | None = None
    batch = current_reducer()
    for answer in _answers(batch.local_views(views), model, x, views_at_once):
        answer = at_least_float32(answer)
        if average == "probabilities":
            answer = answer.softmax(1)
        # Not into the first answer, which may be the view's own.
        total = answer.clone() if total is None else total.add_(answer)
    if total is None:
        raise ValueError("there are no views to average over")
    mean = batch.sum_views(total, len(views)) / len(views)
    # The smallest normal number stands in for zero, so that the log stays finite.
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if average == "probabilities" else mean


def _answers(views: Sequence[View], model: Model, x: Tensor, views_at_once: int) -> Iterator[Tensor]:
    """The aligned answer to each view; those that go through the model together have the same shape."""
    if views_at_once == 1:
        yield from (view(model, x) for view in views)
        return
    together: list[SplitView] = []
    shown: list[Tensor] = []
    for view in map(require_split_view, views):
        image = view.augment(x)
        if shown and shown[0].shape != image.shape:
            yield from _answers_together(together, shown, model, x)
        together.append(view)
        shown.append(image)
        if len(together) == views_at_once:
            yield from _answers_together(together, shown, model, x)
    if together:
        yield from _answers_together(together, shown, model, x)


def _answers_together(together: list[SplitView], shown: list[Tensor], model: Model, x: Tensor) -> Iterator[Tensor]:
    """The answers to these views, which are taken off the lists: their images are not needed beside the stack."""
    stack = torch.cat(shown)
    shown.clear()
    with separate_statistics(len(together)):
        answers = model(stack).chunk(len(together))
    for view, answer in zip(together, answers, strict=True):
        yield view.align(answer, x)
    together.clear()
