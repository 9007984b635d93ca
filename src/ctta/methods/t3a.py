"""T3A: replace the classifier by the mean features of confident predictions."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import current_reducer
from ctta.core.validation import check_integer
from ctta.functional import at_least_float32, entropy
from ctta.methods.parts.supports import keep_most_certain, pick
from ctta.nn.heads import features_and_logits, get_head, head_weight, layer_weight, replace_head_weight_


class T3A(AdaptiveModel):
    """Classify by prototypes: for each class, the mean of its lowest-entropy features; nothing is trained.

    Each batch joins the supports before it is predicted. The supports start with the rows of the classifier, whose bias
    is not used. Returns the inner products of features with prototypes.

    Args:
        net: A network for images, whose classifier can be found or is named by ``head``.
        num_supports: The supports kept for each class, those of the lowest entropy. T3A chooses from 1, 5, 20, 50 and
            100; FOA compares with 20, TTAB with 100.
        head: The name of the classifier; by default it is found.
        batch_stats: The fraction of the batch in BatchNorm's statistics; by default 0, as in T3A.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> logits = T3A(net)(torch.randn(16, 4))

    Reference: Iwasawa and Matsuo, "Test-time classifier adjustment module for model-agnostic domain generalization",
    NeurIPS 2021.
    """

    info = MethodInfo("T3A", paper="Iwasawa and Matsuo, NeurIPS 2021", trains="prototypes", labels_pixels=False)
    features: Tensor
    entropies: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        num_supports: int = 20,
        head: str | None = None,
        batch_stats: float = 0.0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, **common)
        self.num_supports = check_integer("num_supports", num_supports, 1)
        self.head = self.use_head(head)
        weight = head_weight(self.source)
        num_classes, num_features = weight.shape
        # Sorted by entropy within each class; an infinite entropy marks a place that is free.
        self.register_buffer("features", weight.new_zeros(num_classes, num_supports, num_features))
        self.register_buffer("entropies", weight.new_full((num_classes, num_supports), torch.inf))
        classifier = get_head(self.source)
        self.features, self.entropies = self._add(weight, classifier(layer_weight(classifier)).flatten(1))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        features, (self.features, self.entropies) = self._extend(x)
        return self._classify(features, self.features, self.entropies)

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        features, supports = self._extend(x)
        return self._classify(features, *supports)

    @torch.no_grad()
    def _extend(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the features of a batch, and the supports with the batch among them."""
        features, logits = features_and_logits(self.source, x)
        self.require_image_logits(logits)
        batch = current_reducer()
        return features, self._add(batch.gather(features).to(self.features), batch.gather(logits))

    def _add(self, features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the supports of the lowest entropy, of those that exist and of these."""
        entropies, kept = keep_most_certain(self.entropies, logits.argmax(1), entropy(logits))
        return pick(kept, self.features, features), entropies

    def _classify(self, features: Tensor, supports: Tensor, entropies: Tensor) -> Tensor:
        prototypes = self._average(supports, entropies)
        return at_least_float32(features) @ prototypes.T.to(at_least_float32(features))

    @staticmethod
    def _average(supports: Tensor, entropies: Tensor) -> Tensor:
        """Return the prototypes (C, d)."""
        return F.normalize((F.normalize(supports, dim=2) * entropies.isfinite().unsqueeze(2)).sum(1))

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """Return the network with the prototypes as the weights of its classifier, and no bias.

        Args:
            batches: As for :meth:`ctta.AdaptiveModel.deploy`.

        Returns:
            A plain network.
        """
        net = super().deploy(batches)
        replace_head_weight_(net, self.head, self._average(self.features, self.entropies))
        return net
