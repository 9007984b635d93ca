"""NEO: subtract the mean feature of the stream before the classifier."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import current_reducer
from ctta.core.validation import check_fraction
from ctta.functional import at_least_float32
from ctta.nn import BatchStats
from ctta.nn.heads import features_and_logits, head_weight, shift_features_
from ctta.source_stats import SourceStats


class NEO(AdaptiveModel):
    """Classify features after their mean over the stream has been subtracted; nothing is trained.

    A batch counts before it is predicted. A first batch of one image is therefore predicted by the bias alone.

    Args:
        net: A network for images, whose classifier can be found or is named by ``head``.
        decay: The fraction of itself that the mean keeps at each batch, which starts at zero; None for the mean of all
            images so far. The reference has 0.9 for continual streams (preset ``continual``).
        source_stats: Statistics of source images, ``ctta.source_stats(net, batches)``: features are moved to the mean
            of the source's instead of zero. Not part of the reference, whose networks have centered features.
        head: The name of the classifier; by default it is found.
        batch_stats: The fraction of the batch in BatchNorm's statistics, if the network has any; the reference adapts
            vision transformers.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> logits = NEO(net)(torch.randn(16, 4))

    Reference: Murphy et al., "NEO: no-optimization test-time adaptation through latent re-centering", ICLR 2026.
    """

    info = MethodInfo("NEO", paper="Murphy et al., ICLR 2026", trains="mean feature", labels_pixels=False)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"continual": {"decay": 0.9}}
    checks_values_late = True
    center: Tensor
    num_seen: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        decay: float | None = None,
        source_stats: SourceStats | None = None,
        head: str | None = None,
        batch_stats: BatchStats = 0.0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=batch_stats, **common)
        if decay is not None:
            check_fraction("decay", decay)
        self.decay, self.head = decay, self.use_head(head)
        if source_stats is None:
            self.source_stats = None  # type: ignore[assignment]
        else:
            self.use_source_stats(source_stats, "feature_mean")
        self.register_buffer("center", torch.zeros_like(at_least_float32(head_weight(self.source)[0])))
        self.register_buffer("num_seen", self.center.new_zeros(()))

    @classmethod
    def continual(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build NEO for continual streams: recent batches count more than earlier ones.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**cls.presets["continual"], **overrides})

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        logits, center, num_seen = self._recenter(x)
        is_finite = center.isfinite().all()  # one overflow would stay in the mean forever
        self.center.copy_(torch.where(is_finite, center, self.center))
        self.num_seen.copy_(torch.where(is_finite, num_seen, self.num_seen))
        return logits

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._recenter(x)[0]

    @torch.no_grad()
    def _recenter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of centered features, the center, and how many images it is the mean of."""
        features, logits = features_and_logits(self.source, x)
        self.require_image_logits(logits)
        features = current_reducer().gather(at_least_float32(features))
        num_seen = self.num_seen + len(features)
        share = len(features) / num_seen if self.decay is None else 1 - self.decay
        center = self.center + share * (features.mean(0) - self.center)
        return logits + (self._shift(center) @ head_weight(self.source).to(center).T).to(logits), center, num_seen

    def _shift(self, center: Tensor) -> Tensor:
        """Return what is added to features (d)."""
        return -center if self.source_stats is None else self.source_stats["feature_mean"].to(center) - center

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """Return the network with the shift of its features as part of the classifier's bias, which exports anywhere.

        A classifier without a bias gets one, so that the ``state_dict`` has one more key.

        Args:
            batches: As for :meth:`ctta.AdaptiveModel.deploy`.

        Returns:
            A plain network.
        """
        net = super().deploy(batches)
        shift_features_(net, self.head, self._shift(self.center))
        return net
