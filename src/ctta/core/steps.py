"""What an update did, and what may happen around it."""

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override


@dataclass(frozen=True)
class Step:
    """What the last update did. The tensors are scalars without a graph.

    Attributes:
        loss: The mean loss of the batch.
        skipped: Whether nothing was updated because the loss or a gradient was not finite.
        confidence: The mean confidence over the batch: the source's if a gate compares it, else the prediction's.
            None if the method does not compute it.
        augmented: The fraction of elements whose target was averaged over views. None if the method has no views.
        selected: The fraction of elements that the method learned from. None if it selects none; 0 if it found nothing
            to learn from, and then nothing was updated.
        entropy: The mean entropy of what was learned from, where it is not that of the predictions; None otherwise.
        batch_stats: The fraction of the batch in BatchNorm's statistics, the rest being the source's; 0 without
            BatchNorm.
        scale: The fraction of the optimizer's step that was taken; below 1 for small batches with
            ``batch_stats="auto"``.
    """

    loss: Tensor
    skipped: bool
    confidence: Tensor | None = None
    augmented: Tensor | None = None
    selected: Tensor | None = None
    entropy: Tensor | None = None
    batch_stats: float = 1.0
    scale: float = 1.0

    @property
    def updated(self) -> bool:
        """Whether the weights were updated."""
        return not self.skipped and (self.selected is None or bool(self.selected > 0))


class Policy(ABC):
    """Something that happens around the updates of any method, such as a reset; see :mod:`ctta.policies`.

    A policy holds settings only (make it a frozen dataclass). Its state is the module that :meth:`start` returns, which
    becomes part of the model: saved, reset, forked, moved and undone with it.
    """

    #: Name in files and in ``repr``; a model has one policy of each name.
    name: ClassVar[str]
    #: Whether the student predicts, before the step, whatever the method itself would return.
    student_predicts: ClassVar[bool] = False
    #: Whether the policy draws random numbers, so that results depend on the seed of the model.
    is_random: ClassVar[bool] = False

    def start(self, model: Any) -> nn.Module:
        """Return the initial state: a module with buffers of fixed size.

        Args:
            model: The model, with its networks and its optimizer.

        Returns:
            The state, :class:`torch.nn.Module` without buffers if there is none.

        Raises:
            ConfigError: The policy cannot be used with this model.
        """
        return nn.Module()

    def before_update(self, model: Any, state: Any, x: Tensor) -> None:
        """Act between the backward pass and the optimizer's step; gradients are finite, and may be changed.

        Args:
            model: The model.
            state: The state of this policy.
            x: The batch.
        """
        return

    def after_step(self, model: Any, state: Any, x: Tensor, logits: Tensor) -> None:
        """Act after a batch was predicted and learned from; ``model.last_step`` tells what happened.

        If a policy restarts the model, those after it have nothing left to act on and are not called.

        Args:
            model: The model.
            state: The state of this policy.
            x: The batch.
            logits: The predictions, before any correction for the user.
        """
        return

    @override
    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{self.name}({values})"
