"""Test-time augmentation: average the source's predictions over augmented views."""

from typing import ClassVar, Unpack

from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import MethodInfo
from ctta.core.validation import check_choice, check_views_at_once
from ctta.errors import ConfigError
from ctta.methods.parts.prediction import SourceModel
from ctta.nn import BatchStats
from ctta.views import (
    Average,
    Views,
    ViewsAtOnce,
    average_views,
    check_views,
    choose_views_at_once,
    draw_views,
    image_views,
)


class TestAug(SourceModel):
    """Average the source's predictions over augmented views of each batch; nothing is learned.

    Args:
        net: Any network.
        views: What to average over. The default, 32 random views as in CoTTA, expects images in [0, 1]; see
            :func:`ctta.views.image_views`.
        average: The mean of ``"logits"`` (default, as in CoTTA's code) or of ``"probabilities"``.
        views_at_once: How many views go through the network together, each with its own batch statistics. The default
            of 1 needs the least memory. ``"auto"`` chooses by the size of the batch, see
            :func:`ctta.views.choose_views_at_once`.
        batch_stats: The fraction of the batch in BatchNorm's statistics. The default ``"auto"`` uses only the batch
            from 16 images on, and blends fewer with the source's statistics; 1 for only the batch.
        seed: The seed of the random views.

    >>> import torch
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    >>> TestAug(net, views=image_views(4))(torch.rand(2, 3, 4, 4)).shape
    torch.Size([2, 3])
    """

    __test__ = False  # tells pytest that this is not a test case

    info = MethodInfo("Test Aug", forward_passes="views")
    check_settings: ClassVar = {"views": image_views(2)}

    def __init__(
        self,
        net: nn.Module,
        *,
        views: Views = image_views(32),
        average: Average = "logits",
        views_at_once: ViewsAtOnce = 1,
        batch_stats: BatchStats = "auto",
        seed: int = 0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, seed=seed, **common)
        check_choice("average", average, ("logits", "probabilities"))
        check_views(views)
        if not views:
            raise ConfigError("TestAug needs at least one view to average over")
        check_views_at_once(views_at_once, views, self.source)
        self.views, self.average, self._views_at_once = views, average, views_at_once

    @property
    def views_at_once(self) -> ViewsAtOnce:
        """How many views go through the network together; read-only, because forks share layers that depend on it."""
        return self._views_at_once

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        views = draw_views(self.views, self.generator("views"))
        at_once = choose_views_at_once(self.views_at_once, views, self.source, x)
        return average_views(views, self.source, x, self.average, at_once)
