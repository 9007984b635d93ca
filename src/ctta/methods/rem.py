"""REM: a vision transformer must be surer of whole images than of images whose object is masked."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutSeed
from ctta.core.model import MethodInfo
from ctta.core.validation import check_fraction, check_non_negative, check_number
from ctta.errors import ConfigError
from ctta.functional import confidence, cross_entropy, entropy
from ctta.methods.parts.prediction import StudentModel
from ctta.nn.vit import change_tokens, find_blocks, record_class_attention
from ctta.optim import OptimizerFactory


class REM(StudentModel):
    """Rank predictions of an image by how much of its object is masked, and learn from their order.

    The patches that the class token attends to most are masked. Predictions with more masked patches learn from those
    with fewer, and those with fewer must have the lower entropy.

    Args:
        net: A vision transformer with a class token, such as timm's, torchvision's or transformers' ViT; the scales and
            shifts of its normalization layers are trained.
        masked: The fractions of patches to mask, in ascending order, beside the whole image. The default is the
            authors' code; their text has ``(0.05, 0.1)``.
        ranking: The weight of the order of the entropies.
        margin: By how much the entropy must be lower, as a fraction of ln C.
        skip_top: Whether to leave out the last quarter of the blocks and the norm after them, as the authors do.
        batch_stats: The fraction of the batch in BatchNorm's statistics, if the network has any.

    >>> import ctta
    >>> logits = REM(ctta.testing.networks.BlockViT())(torch.rand(4, 3, 16, 16))

    Reference: Han, Na and Hwang, "Ranked entropy minimization for continual test-time adaptation", ICML 2025.
    """

    info = MethodInfo(
        "REM",
        paper="Han et al., ICML 2025",
        trains="norm layers but the top",
        forward_passes=3,
        backward_passes=1,
        num_networks=2,
        labels_pixels=False,
        needs_vit=True,
    )
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        masked: Sequence[float] = (0.1, 0.2),
        ranking: float = 1.0,
        margin: float = 0.0,
        skip_top: bool = True,
        **common: Unpack[CommonWithoutSeed],
    ) -> None:
        super().__init__(net, **common)
        if not masked or list(masked) != sorted(masked):
            raise ConfigError(f"masked must be one or more fractions in ascending order, as (0.1, 0.2), got {masked}")
        for fraction in masked:
            check_fraction("masked", fraction)
        check_non_negative("ranking", ranking)
        check_number("margin", margin)
        self.masked, self.ranking, self.margin, self.skip_top = tuple(masked), ranking, margin, skip_top
        self.blocks = find_blocks(self.source)
        self.student = self.copy_of_source()
        self.train_norms_(self.student, skip_top=skip_top)
        self.optimize(self.student, optimizer)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        with record_class_attention(self.student, self.blocks[-1]) as recorded:
            logits = self.predict_step(x)
        self.require_image_logits(logits)
        (attention,) = recorded
        order = attention.argsort(dim=1, stable=True)  # the object is last
        views = [logits, *(self._predict_masked(x, order, fraction) for fraction in self.masked)]
        entropies, margin = [entropy(view) for view in views], self.margin * math.log(logits.shape[1])
        losses = entropies[0].new_zeros(len(x))
        for less, more in combinations(range(len(views)), 2):
            losses = losses + cross_entropy(views[more], views[less].detach())
            losses = losses + self.ranking * (entropies[less] - entropies[more].detach() + margin).relu()
        self.minimize(losses.mean(), confidence=confidence(logits.detach()).mean())
        return logits

    def _predict_masked(self, x: Tensor, order: Tensor, fraction: float) -> Tensor:
        """Return the logits without the fraction of patches that come last in ``order`` (N, patches)."""
        kept = order[:, : int((1 - fraction) * order.shape[1])] + 1

        def keep(tokens: Tensor) -> Tensor:
            patches = tokens.gather(1, kept.unsqueeze(2).expand(-1, -1, tokens.shape[2]))
            return torch.cat([tokens[:, :1], patches], 1)

        with change_tokens(self.student, self.blocks[0], keep):
            return self.predict_step(x)
