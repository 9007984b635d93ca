"""NOTE: entropy minimization on a class-balanced reservoir, with predictions for single images."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.functional import at_least_float32, confidence
from ctta.memory import MemoryModel, ReservoirMemory
from ctta.method_info import MethodInfo
from ctta.norms.running import RunningStatistics, track_statistics, use_tracked_statistics_
from ctta.optim import OptimizerFactory
from ctta.steps import Policy
from ctta.surgery import Output
from ctta.validation import check_choice, check_fraction, check_integer


class NOTE(MemoryModel):
    """Minimize the entropy of a memory with as many images of each predicted class as possible.

    The network predicts with running statistics, so a prediction depends on one image only and streams may be sorted
    by class. Every ``update_every`` images it takes one step on the memory, whose statistics the running ones follow.

    Args:
        net: A network with normalization layers of any kind, whose scales and shifts are trained.
        optimizer: A factory of the optimizer.
        lr: The learning rate, if it should differ from that of ``optimizer``.
        memory_size: The number of images in the memory.
        update_every: The number of images between two updates; they need not fit the batches.
        momentum: The fraction of the memory in an update of BatchNorm's statistics.
        average: What the entropy is averaged over: ``"entries"`` of the matrix of probabilities, as in the authors'
            code, or ``"images"``, which makes the loss larger by the number of classes.
        iabn: The k of instance-aware batch normalization, 4 in the authors' code, for a network whose BatchNorm layers
            were trained with it; None for any other network.
        policies: What happens around the updates, see :mod:`ctta.policies`.
        seed: The seed of the reservoir.
        output: Where the logits are in the network's output; by default the usual places.

    >>> model = NOTE(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), memory_size=8, update_every=8)
    >>> model(torch.randn(1, 4)).shape
    torch.Size([1, 3])

    Reference: Gong et al., "NOTE: robust continual test-time adaptation against temporal correlation", NeurIPS 2022.
    """

    info = MethodInfo("NOTE", "Gong et al., NeurIPS 2022", "norm layers", "1, and 1 per update", 1, num_networks=2)
    update_every: int

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-4),
        lr: float | None = None,
        memory_size: int = 64,
        update_every: int = 64,
        momentum: float = 0.01,
        average: Literal["entries", "images"] = "entries",
        iabn: float | None = None,
        policies: Sequence[Policy] = (),
        seed: int = 0,
        output: Output = None,
    ) -> None:
        super().__init__(net, policies=policies, batch_stats=0.0, seed=seed, output=output)
        check_fraction("momentum", momentum)
        check_choice("average", average, ("entries", "images"))
        self.memory, self.update_every = ReservoirMemory(memory_size), check_integer("update_every", update_every, 1)
        self.memory_size, self.momentum, self.average, self.iabn = memory_size, momentum, average, iabn
        self.student = self.copy_of_source()
        self._track_statistics_(self.student)
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer, lr)

    @override
    @torch.no_grad()
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        return logits

    @override
    def update(self, number: int) -> bool:
        images, _ = self.memory.recall()
        with track_statistics():
            logits = self.student(images)
        p = at_least_float32(logits).softmax(1)
        loss = -(p * (p + 1e-6).log()).sum(1).mean()
        if self.average == "entries":
            loss = loss / p.shape[1]
        return self.minimize(loss, confidence=confidence(logits.detach()).mean())

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        net = super().deploy(batches)
        if self.iabn is not None:
            self._track_statistics_(net)
        return net

    def _track_statistics_(self, net: nn.Module) -> None:
        use_tracked_statistics_(net, RunningStatistics(self.momentum, normalize_by="batch", shrink=self.iabn))
