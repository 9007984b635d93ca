"""NOTE: entropy minimization on a class-balanced reservoir, with predictions for single images."""

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal, Self, Unpack

import torch
from torch import nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonWithoutBatchStats
from ctta.core.model import MethodInfo
from ctta.core.parallel import change_call
from ctta.core.validation import check_choice, check_fraction, check_integer, check_non_negative
from ctta.functional import at_least_float32, confidence
from ctta.methods.parts.memory import LatestMemory, MemoryModel, ReservoirMemory
from ctta.nn import attach_norm_hooks_
from ctta.nn.running import RunningStatistics
from ctta.optim import OptimizerFactory


class NOTE(MemoryModel):
    """Minimize the entropy of a memory with as many images of each predicted class as possible.

    The network predicts with running statistics, so a prediction depends on one image only and streams may be sorted
    by class. Every ``update_every`` images it takes one step on the memory, whose statistics the running ones follow.

    Args:
        net: A network with normalization layers of any kind, whose scales and shifts are trained.
        memory_size: The number of images in the memory.
        update_every: The number of images between two updates; they need not fit the batches.
        momentum: The fraction of the memory in an update of BatchNorm's statistics.
        average: What the entropy is averaged over: ``"entries"`` of the matrix of probabilities, as in the authors'
            code, or ``"images"``, which makes the loss larger by the number of classes.
        iabn: The k of instance-aware batch normalization, 4 in the authors' code, for a network whose BatchNorm layers
            were trained with it; None for any other network.
        iid: Whether batches have images of all classes (NOTE*): each is normalized by its own statistics, and the
            memory holds the latest images. :meth:`iid_stream` has the learning rate for it.
        seed: The seed of the reservoir.

    >>> model = NOTE(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), memory_size=8, update_every=8)
    >>> model(torch.randn(1, 4)).shape
    torch.Size([1, 3])

    Reference: Gong et al., "NOTE: robust continual test-time adaptation against temporal correlation", NeurIPS 2022.
    """

    info = MethodInfo("NOTE", "Gong et al., NeurIPS 2022", "norm layers", "1, and 1 per update", 1, num_networks=2)
    presets: ClassVar = {"iid_stream": {"iid": True, "optimizer": partial(torch.optim.Adam, lr=1e-3)}}
    update_every: int

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-4),
        memory_size: int = 64,
        update_every: int = 64,
        momentum: float = 0.01,
        average: Literal["entries", "images"] = "entries",
        iabn: float | None = None,
        iid: bool = False,
        **common: Unpack[CommonWithoutBatchStats],
    ) -> None:
        super().__init__(net, batch_stats=0.0, **common)
        check_fraction("momentum", momentum)
        check_non_negative("iabn", 0.0 if iabn is None else iabn)
        check_choice("average", average, ("entries", "images"))
        self.memory = LatestMemory(memory_size) if iid else ReservoirMemory(memory_size)
        self.update_every, self.iid = check_integer("update_every", update_every, 1), iid
        self.memory_size, self.momentum, self.average, self.iabn = memory_size, momentum, average, iabn
        self.student = self.copy_of_source()
        self._track_statistics_(self.student, iid)
        self.train_norms_(self.student)
        self.optimize(self.student, optimizer)

    @override
    def update(self, number: int) -> bool:
        images, _ = self.memory.recall()
        with change_call(is_tracking=True):
            logits = self.student(images)
        p = at_least_float32(logits).softmax(1)
        loss = -(p * (p + 1e-6).log()).sum(1).mean() / (p.shape[1] if self.average == "entries" else 1)
        return self.minimize(loss, confidence=confidence(logits.detach()).mean())

    @classmethod
    def iid_stream(cls, net: nn.Module, **overrides: Any) -> Self:
        """Build NOTE*, for streams that are not sorted by class.

        Args:
            net: The network.
            **overrides: Keyword arguments that differ.

        Returns:
            The model.
        """
        return cls(net, **{**cls.presets["iid_stream"], **overrides})

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        net, by_batch = super().deploy(batches), self.iid and batches is None
        if by_batch or self.iabn is not None:
            self._track_statistics_(net, by_batch)
        return net

    def _track_statistics_(self, net: nn.Module, by_batch: bool) -> None:
        momentum = 0.0 if by_batch else self.momentum
        attach_norm_hooks_(net, lambda _: RunningStatistics(momentum, "batch", self.iabn, always=by_batch))
