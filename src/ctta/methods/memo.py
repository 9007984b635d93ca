"""MEMO: each image alone adapts the source to agree on its augmented views, and is then predicted."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import change_call, current_reducer, replicated
from ctta.core.updates import Step
from ctta.errors import ConfigError
from ctta.functional import confidence, marginal_entropy
from ctta.nn import BatchStats
from ctta.optim import OptimizerFactory, build_optimizer
from ctta.views import Views, augmix_views, check_views, draw_views
from ctta.views.average import View, augment_with_views, require_split_view


class MEMO(AdaptiveModel):
    """Take one step from the source for each image, on the entropy of its mean prediction over views; then predict.

    Nothing is carried over from one image to the next, so there is nothing for policies to do, and the order and the
    batches of a stream do not matter. Every image costs a pass of all views, a backward pass and a further pass.

    Args:
        net: A network for images, of which every parameter is trained.
        optimizer: A factory of the optimizer, which is made anew for each image. The default is that for CIFAR;
            ImageNet has SGD with 2.5e-4, or ``partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.01)`` for large nets.
        views: The views of an image, each with ``augment(x)``, which go through the network as one batch. The default
            expects images in [0, 1], see :func:`ctta.views.augmix_views`; ImageNet's is (64, ``crop="resize"``).
        batch_stats: The fraction of the views, or of the image, in BatchNorm's statistics. The default is the
            reference's: the source's count as 16 images and the batch as one.
        seed: The seed of the random views.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> MEMO(net, views=augmix_views(4))(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 10])

    Reference: Zhang, Levine and Finn, "MEMO: test time robustness via adaptation and augmentation", NeurIPS 2022.
    """

    info = MethodInfo(
        "MEMO",
        paper="Zhang et al., NeurIPS 2022",
        trains="all weights",
        forward_passes="1 + views",
        backward_passes=1,
        num_networks=2,
        labels_pixels=False,
        is_episodic=True,
    )
    checks_values_late = True
    check_settings: ClassVar = {"views": augmix_views(1)}

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=0.005),
        lr: float | None = None,
        views: Views = augmix_views(32),
        batch_stats: BatchStats = 1 / 17,
        seed: int = 0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, lr=lr, batch_stats=batch_stats, seed=seed, **common)
        check_views(views)
        if not views:
            raise ConfigError("MEMO needs at least one view of each image to learn from")
        for view in views if isinstance(views, Sequence) else ():  # drawn views are checked once they are drawn
            require_split_view(view, "MEMO")
        self.views = views
        self.adapted = self.copy_of_source()  # no student, since it equals the source but within a step
        self.optimize(self.adapted, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        batch = current_reducer()
        rows = batch.local(torch.arange(batch.total_count(len(x)))).tolist()
        with replicated(), change_call(num_images=1):  # no image affects another one
            episodes = [
                self._adapt_to(image, draw_views(self.views, self.generator(f"views {row}")))
                for row, image in zip(rows, x.split(1), strict=True)
            ]
        logits, losses = (torch.cat(parts) for parts in zip(*episodes, strict=True))
        is_skipped = not batch.all(losses.isfinite())
        self.num_skipped += is_skipped
        means = batch.mean(losses.mean()), batch.mean(confidence(logits).mean())
        self.last_step = Step(means[0], is_skipped, confidence=means[1], batch_stats=self.batch_fraction(1))
        return logits

    def _adapt_to(self, image: Tensor, views: Sequence[View]) -> tuple[Tensor, Tensor]:
        """Return the logits of one image (1, C) and the loss (1); the loss is NaN if there was no step."""
        assert self.optimizer is not None, "built by the constructor"
        logits = self.adapted(augment_with_views(views, image, "MEMO"))
        self.require_image_logits(logits)
        loss = marginal_entropy(logits)
        parameters = list(self.adapted.parameters())
        try:
            loss.backward()
            tensors = [loss.detach(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]
            norms = [nn.utils.get_total_norm(tensors, kind) for kind in (2.0, torch.inf)]  # the first may overflow
            is_finite = torch.stack(norms).isfinite().any()
            self.optimizer.step()
            with torch.no_grad():  # decided on the device, since the host would wait for every image
                for parameter, original in zip(parameters, self.source.parameters(), strict=True):
                    parameter.copy_(torch.where(is_finite, parameter, original))
            torch.clear_autocast_cache()  # or a surrounding autocast would predict with the weights before the step
            prediction = self.adapted(image).detach()
        finally:
            self.optimizer.zero_grad()
            self._return_to_source_()
        return prediction, torch.where(is_finite, loss.detach(), torch.nan).view(1)

    @torch.no_grad()
    def _return_to_source_(self) -> None:
        for adapted, original in zip(self.adapted.parameters(), self.source.parameters(), strict=True):
            adapted.copy_(original)
        self.optimizer = build_optimizer(self.optimizer_factory, self.adapted)
        torch.clear_autocast_cache()
