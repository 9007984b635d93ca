"""ZeroSiam: entropy minimization of predictions through a linear layer that is pulled to those without it."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.core.validation import check_positive
from ctta.functional import at_least_float32, confidence, entropy
from ctta.methods.parts.prediction import StudentModel
from ctta.nn.heads import features_and_logits, get_head, head_weight
from ctta.optim import OptimizerFactory, scale_rates, split_groups_


class ZeroSiam(StudentModel):
    """Minimize the entropy of predictions from linearly mapped features, and their distance to those without the map.

    The map is trained as well, faster than the norm layers, and takes up what would let the features collapse. The
    predictions that are returned do not pass it.

    Args:
        net: A network for images with normalization layers of any kind.
        optimizer: A factory of the optimizer. The default is the setting for ResNet-50 with GroupNorm on ImageNet-C in
            batches of 64; a learning rate is proportional to the batch size.
        map_rate: The learning rate of the map, as a multiple of that of the norm layers: 10 for ResNet-50, ViT-S and
            ConvNeXt-T, 1 for ViT-B (preset ``vit``), 5 for Swin-T.
        head: The name of the classifier; by default it is found.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> logits = ZeroSiam(net)(torch.randn(16, 4))

    Reference: Chen et al., "ZeroSiam: an efficient asymmetry for test-time entropy optimization without collapse",
    ICLR 2026.
    """

    info = MethodInfo(
        "ZeroSiam", "Chen et al., ICLR 2026", "norm layers and a map", 1, 1, num_networks=2, labels_pixels=False
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "vit": {"optimizer": partial(torch.optim.SGD, lr=5e-3, momentum=0.9), "map_rate": 1.0}
    }
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=2.5e-3, momentum=0.9),
        map_rate: float = 10.0,
        head: str | None = None,
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        check_positive("map_rate", map_rate)
        self.map_rate, self.head = map_rate, self.use_head(head)
        self.student = self.copy_of_source()
        self.train_norms_(self.student)
        weights = head_weight(self.source)
        self.map = nn.utils.skip_init(nn.Linear, weights.shape[1], weights.shape[1], bias=False).to(weights)
        nn.init.eye_(self.map.get_parameter("weight"))
        self.optimize(nn.ModuleList([self.student, self.map]), optimizer)
        assert self.optimizer is not None, "it was just built"
        split_groups_(self.optimizer)  # the last one is that of the map

    @classmethod
    def vit(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build ZeroSiam with the settings for ViT-B.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**cls.presets["vit"], **overrides})

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        features, logits = features_and_logits(self.student, x)
        self.require_image_logits(logits)
        head = get_head(self.student)
        mapped = F.linear(features @ self.map.get_parameter("weight").T, head.weight.flatten(1), head.bias)
        losses = entropy(mapped) + symmetric_divergence(mapped, logits.detach())
        assert self.optimizer is not None, "built by the constructor"
        rates = [*[1.0] * (len(self.optimizer.param_groups) - 1), self.map_rate]
        with scale_rates(self.optimizer, rates):
            self.minimize(losses.mean(), confidence=confidence(logits.detach()).mean())
        return logits


def symmetric_divergence(logits: Tensor, others: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergences of two predictions (N, C) in both directions, added (N)."""
    one, other = at_least_float32(logits).log_softmax(1), at_least_float32(others).log_softmax(1)
    return ((one.exp() - other.exp()) * (one - other)).sum(1)
