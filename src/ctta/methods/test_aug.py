"""Test-time augmentation: average the source's answer over augmented views."""

from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.surgery import Output
from ctta.validation import check_choice, check_views_at_once
from ctta.views import Average, Views, average_views, check_images, check_views, draw_views, image_views


class TestAug(AdaptiveModel):
    """The mean answer of the source over augmented views of each batch; nothing is learnt.

    Args:
        net: any network.
        views: what to average over; the default expects images in [0, 1], see :func:`ctta.views.image_views`.
        average: the mean of ``"logits"`` or of ``"probabilities"``.
        views_at_once: how many views go through the network together, each with statistics of its own.
        batch_stats: share of the batch in BatchNorm's statistics.
        seed: of the draws of views.
        output: where the logits are in what the network returns, if not found by itself.

    >>> import torch
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    >>> TestAug(net, views=image_views(4))(torch.rand(2, 3, 4, 4)).shape
    torch.Size([2, 3])
    """

    __test__ = False  # tells pytest that this is no test case

    def __init__(
        self,
        net: nn.Module,
        *,
        views: Views = image_views(32),
        average: Average = "logits",
        views_at_once: int = 1,
        batch_stats: float = 1.0,
        seed: int = 0,
        output: Output = None,
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, seed=seed, output=output)
        check_choice("average", average, ("logits", "probabilities"))
        check_views(views)
        if not views:
            raise ValueError("TestAug needs at least one view to average over")
        check_views_at_once(views_at_once, views, self.source)
        self.views, self.average, self._views_at_once = views, average, views_at_once

    @property
    def views_at_once(self) -> int:
        """Fixed once built: forks share layers whose mode depends on it."""
        return self._views_at_once

    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        check_images(x, self.views)

    def adapt_step(self, x: Tensor) -> Tensor:
        return self.predict_step(x)

    def predict_step(self, x: Tensor) -> Tensor:
        views = draw_views(self.views, self.generator("views"))
        return average_views(views, self.source, x, self.average, self.views_at_once)
