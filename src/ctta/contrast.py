"""Contrast between images, their views and the prototypes of the source's classes: what RMT and SANTA share."""

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.base import AdaptiveModel
from ctta.functional import at_least_float32, contrastive_loss
from ctta.heads import features_and_logits, head_weight
from ctta.source_stats import SourceStats
from ctta.validation import check_integer, check_non_negative, check_positive
from ctta.views import Views, check_images, check_views, draw_views


class Projector(nn.Module):
    """Two linear layers with a ReLU between, through which features are compared.

    The weights are drawn as torch draws those of linear layers, but from a seed of their own: equal seeds give equal
    projectors, whatever else is drawn.

    Args:
        num_features: The number of features.
        num_outputs: The number of outputs, and of hidden units.
        seed: The seed of the model.

    >>> Projector(8, 4, seed=0)(torch.randn(5, 8)).shape
    torch.Size([5, 4])
    """

    @torch.inference_mode(False)
    def __init__(self, num_features: int, num_outputs: int, seed: int) -> None:
        super().__init__()
        digest = hashlib.blake2b(f"{seed}/projector".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        self.hidden = _draw_linear(num_features, num_outputs, generator)
        self.outputs = _draw_linear(num_outputs, num_outputs, generator)

    @override
    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.outputs(F.relu(self.hidden(features)))
        return projected


@torch.no_grad()
def _draw_linear(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with weights and biases uniform within 1 / sqrt(inputs), torch's default."""
    # Without torch's own initialization, which would draw from the global generator.
    layer = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, dtype=torch.float32)
    for parameter in layer.parameters():
        bound = num_inputs**-0.5
        parameter.uniform_(-bound, bound, generator=generator)
    assert isinstance(layer, nn.Linear)
    return layer


@torch.no_grad()
def nearest_prototypes(features: Tensor, stats: SourceStats) -> Tensor:
    """Return the mean of the source's class that is nearest to each feature, by cosine.

    Args:
        features: (N, d).
        stats: Statistics with ``class_means`` (C, d) and ``class_counts`` (C). Classes without images have no mean.

    Returns:
        Prototypes (N, d), without gradient.
    """
    means = stats["class_means"]
    cosines = F.normalize(at_least_float32(features), dim=1) @ F.normalize(at_least_float32(means), dim=1).T
    nearest = cosines.masked_fill(stats["class_counts"] == 0, -torch.inf).argmax(1)
    return means[nearest].to(features.dtype)


class ContrastModel(AdaptiveModel):
    """A method that compares each image with its views and with the nearest class of the source.

    A subclass calls :meth:`use_contrast` in its constructor, before it copies the source, and trains ``projector`` with
    its student.
    """

    projector: Projector
    contrast_weight: float
    temperature: float
    projection: int
    views: Views
    head: str

    def use_contrast(
        self,
        source_stats: SourceStats | None,
        *,
        weight: float,
        temperature: float,
        projection: int,
        views: Views,
        head: str | None,
    ) -> None:
        """Check and keep the hyperparameters of the contrast, and build the projector.

        Args:
            source_stats: The hyperparameter of the same name.
            weight: The hyperparameter ``contrast_weight``.
            temperature: Divides the cosine similarities.
            projection: The number of outputs of the projector.
            views: The views of each batch.
            head: The name of the classifier; None to look for it.
        """
        check_non_negative("contrast_weight", weight)
        check_positive("temperature", temperature)
        check_views(views)
        self.contrast_weight, self.temperature, self.views = weight, temperature, views
        self.projection, self.head = check_integer("projection", projection, 1), self.use_head(head)
        self.use_source_stats(source_stats, "class_means", "class_counts")
        weights = head_weight(self.source)
        self.projector = Projector(weights.shape[1], projection, self.seed).to(weights)

    @override
    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        check_images(x, self.views)

    def compute_views(self, net: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the features (N, d) and the logits (N, C) of the batch, and then of each of its views.

        Without views the batch is its own.
        """
        features, logits = features_and_logits(net, x)
        self.require_image_logits(logits)
        drawn = draw_views(self.views, self.generator("views"))
        views = [features_and_logits(partial(view, net), x) for view in drawn] or [(features, logits)]
        return [features, *(each for each, _ in views)], [logits, *(each for _, each in views)]

    def contrast(self, features: Sequence[Tensor]) -> Tensor | float:
        """Return the weighted contrastive loss of which an image, its views and its nearest prototype are one sample.

        Args:
            features: Those of the batch (N, d), and then of each view.

        Returns:
            The loss, a scalar; with several processes that of the whole batch.
        """
        if self.contrast_weight == 0:
            return 0.0
        rows = torch.stack([nearest_prototypes(features[0], self.source_stats), *features], 1)
        return self.contrast_weight * contrastive_loss(self.projector(rows), self.temperature)


def average_with_views(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of a batch, half of it from the batch itself and half from its views.

    Args:
        losses: Those of the batch (N), and then of each view.

    Returns:
        A scalar.
    """
    return (losses[0] + torch.stack(list(losses[1:])).mean(0)).mean() / 2
