"""EATA: ETA with a penalty on changes of the weights that matter on source images."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.model import MethodInfo
from ctta.core.validation import check_non_negative
from ctta.functional import pair_trained
from ctta.methods.eta import ETA, ETAArguments
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats


class EATA(ETA):
    """Adapt as ETA does, with a penalty against forgetting that is weighted by Fisher information.

    Args:
        net: A network with normalization layers of any kind.
        source_stats: Statistics of source images, ``ctta.source_stats(net, batches)``, in batches of the size of the
            stream's. The reference uses 2,000 images.
        optimizer: A factory of the optimizer. The default is the setting for CIFAR; that for ImageNet is
            ``partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9)``.
        fisher_weight: Weight of the penalty: 1 for CIFAR (default), 2000 for ImageNet.
        margin: Learn from entropies below this fraction of ln C, which is also where a weight is 1.
        redundancy: Learn from predictions whose cosine to the average is smaller: 0.4 for CIFAR10-C (default), 0.1 for
            CIFAR100-C, 0.05 for ImageNet-C.
        momentum: The fraction that the average of selected predictions keeps.
        entropy: ``"softmax"``, or ``"come"`` for COME's.
        num_classes: By default the outputs of the classifier, if it is found.
        batch_stats: The fraction of the batch in BatchNorm's statistics; by default only the batch.

    >>> import ctta
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> stats = ctta.source_stats(net, [torch.randn(16, 4) for _ in range(4)])
    >>> logits = EATA(net, source_stats=stats)(torch.randn(16, 4))

    Reference: Niu et al., "Efficient test-time model adaptation without forgetting", ICML 2022.
    """

    info = MethodInfo(
        "EATA",
        paper="Niu et al., ICML 2022",
        trains="norm layers",
        backward_passes=1,
        num_networks=2,
        needs_source_data=True,
    )

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        fisher_weight: float = 1.0,
        **eta: Unpack[ETAArguments],
    ) -> None:
        super().__init__(net, optimizer=optimizer, **eta)
        check_non_negative("fisher_weight", fisher_weight)
        self.fisher_weight = fisher_weight
        self.use_source_stats(source_stats, "fisher")

    @override
    def penalty(self) -> Tensor:
        fisher = self.source_stats.by_name("fisher")
        names = [name for name, parameter in self.student.named_parameters() if parameter.requires_grad]
        pairs = pair_trained(self.student, self.source)
        terms = [(fisher[n] * (new - old).square()).sum() for n, (new, old) in zip(names, pairs, strict=True)]
        return self.fisher_weight * torch.stack(terms).sum()
