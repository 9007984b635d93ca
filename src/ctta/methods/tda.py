"""TDA: correct a zero-shot classifier by caches of confident and of uncertain images."""

import math
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import current_reducer
from ctta.core.validation import check_each, check_fraction, check_integer, check_non_negative
from ctta.functional import at_least_float32, entropy
from ctta.methods.parts.contrast import normalize_rows
from ctta.methods.parts.supports import keep_most_certain, pick
from ctta.nn import BatchStats
from ctta.nn.heads import features_and_logits, head_weight


class Caches(NamedTuple):
    """What TDA knows of the stream, for each of the C predicted classes.

    Attributes:
        positive_features: Features of length 1 of the most certain images (C, P, d).
        positive_entropies: Their entropies (C, P), ascending; infinite at places that are free.
        negative_features: Features of uncertain images (C, Q, d).
        negative_entropies: Their entropies (C, Q), likewise.
        possible: Which classes such an image may be of (C, Q, C).
    """

    positive_features: Tensor
    positive_entropies: Tensor
    negative_features: Tensor
    negative_entropies: Tensor
    possible: Tensor


class TDA(AdaptiveModel):
    """Add to the logits how similar an image is to certain images of each class, and subtract it for uncertain ones.

    Nothing is trained. A batch joins the caches before it is predicted. Made for zero-shot classifiers,
    :func:`ctta.zero_shot`, whose logits are cosines times 100; the weights below are for logits of that size.

    Args:
        net: A network for images, whose classifier can be found or is named by ``head``.
        positive_weight: The weight of certain images: 2 for ImageNet and DTD, 4 for EuroSAT.
        positive_sharpness: How fast their similarity falls: 5 for ImageNet, 3 for DTD, 8 for EuroSAT.
        num_positive: How many of them are kept for each class, those of the lowest entropy.
        negative_weight: The weight of uncertain images.
        negative_sharpness: How fast their similarity falls.
        num_negative: How many of them are kept for each class, those of the lowest entropy; 0 for none.
        min_entropy: An uncertain image has more than this part of the binary logarithm of C; its entropy is in nats, as
            in the reference.
        max_entropy: It has less than this part.
        min_probability: A class with a larger probability is one that such an image may be of.
        head: The name of the classifier; by default it is found.
        batch_stats: The fraction of the batch in BatchNorm's statistics, if the network has any.

    >>> import ctta
    >>> encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 6))
    >>> logits = TDA(ctta.zero_shot(encoder, torch.randn(4, 6)))(torch.rand(16, 3, 4, 4))

    Reference: Karmanov et al., "Efficient test-time adaptation of vision-language models", CVPR 2024.
    """

    info = MethodInfo("TDA", paper="Karmanov et al., CVPR 2024", trains="caches", labels_pixels=False)
    positive_features: Tensor
    positive_entropies: Tensor
    negative_features: Tensor
    negative_entropies: Tensor
    possible: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        positive_weight: float = 2.0,
        positive_sharpness: float = 5.0,
        num_positive: int = 3,
        negative_weight: float = 0.117,
        negative_sharpness: float = 1.0,
        num_negative: int = 2,
        min_entropy: float = 0.2,
        max_entropy: float = 0.5,
        min_probability: float = 0.03,
        head: str | None = None,
        batch_stats: BatchStats = 0.0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, **common)
        check_each(check_non_negative, positive_weight=positive_weight, negative_weight=negative_weight)
        check_each(check_non_negative, positive_sharpness=positive_sharpness, negative_sharpness=negative_sharpness)
        check_each(check_fraction, min_entropy=min_entropy, max_entropy=max_entropy, min_probability=min_probability)
        self.positive_weight, self.positive_sharpness = positive_weight, positive_sharpness
        self.negative_weight, self.negative_sharpness = negative_weight, negative_sharpness
        self.num_positive = check_integer("num_positive", num_positive, 1)
        self.num_negative = check_integer("num_negative", num_negative, 0)
        self.min_entropy, self.max_entropy, self.min_probability = min_entropy, max_entropy, min_probability
        self.head = self.use_head(head)
        weight = at_least_float32(head_weight(self.source))
        num_classes, width = weight.shape
        start = Caches(
            weight.new_zeros(num_classes, num_positive, width),
            weight.new_full((num_classes, num_positive), torch.inf),
            weight.new_zeros(num_classes, num_negative, width),
            weight.new_full((num_classes, num_negative), torch.inf),
            weight.new_zeros(num_classes, num_negative, num_classes, dtype=torch.bool),
        )
        for name, value in start._asdict().items():
            self.register_buffer(name, value)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits, caches = self._extend(x)
        for name, value in caches._asdict().items():
            self.get_buffer(name).copy_(value)
        return logits

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._extend(x)[0]

    @torch.no_grad()
    def _extend(self, x: Tensor) -> tuple[Tensor, Caches]:
        """Return the corrected logits of a batch, and the caches with the batch in them."""
        features, logits = features_and_logits(self.source, x)
        self.require_image_logits(logits)
        features = normalize_rows(features).to(self.positive_features)
        caches = self._add(current_reducer().gather(features), current_reducer().gather(at_least_float32(logits)))
        similar = _similarity(features, caches.positive_features, caches.positive_entropies, self.positive_sharpness)
        uncertain = _similarity(features, caches.negative_features, caches.negative_entropies, self.negative_sharpness)
        possible = caches.possible.flatten(0, 1).to(uncertain)
        correction = self.positive_weight * similar.sum(2) - self.negative_weight * uncertain.flatten(1) @ possible
        return logits + correction.to(logits), caches

    def _add(self, features: Tensor, logits: Tensor) -> Caches:
        """Return the caches with the images of a batch, of which the most certain of each class are kept."""
        labels, entropies, probabilities = logits.argmax(1), entropy(logits), logits.softmax(1)
        share = entropies / math.log2(logits.shape[1])
        is_uncertain = (share > self.min_entropy) & (share < self.max_entropy)
        possible = (probabilities > self.min_probability) & (probabilities < 1)
        kept_entropies, kept = keep_most_certain(self.positive_entropies, labels, entropies)
        positive = pick(kept, self.positive_features, features), kept_entropies
        entropies = torch.where(is_uncertain, entropies, torch.inf)
        kept_entropies, kept = keep_most_certain(self.negative_entropies, labels, entropies)
        negative = pick(kept, self.negative_features, features), kept_entropies
        return Caches(*positive, *negative, pick(kept, self.possible, possible))


def _similarity(features: Tensor, stored: Tensor, entropies: Tensor, sharpness: float) -> Tensor:
    """Return how similar features (N, d) are to stored ones (C, S, d): (N, C, S), zero at places that are free."""
    cosines = features @ stored.flatten(0, 1).T
    return (sharpness * (cosines - 1)).exp().view(len(features), *entropies.shape) * entropies.isfinite()
