"""A learning rate for each tensor, from the sensitivity of its weights (PALM)."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.core.state import BufferList
from ctta.optim import batch_gradients


class SensitivityRates(nn.Module):
    """Factors of learning rates: how much the sensitivity of the weights of a tensor differs from its average.

    The sensitivity is the absolute value of weight times gradient. Tensors of a large gradient are not measured.

    Args:
        optimizer: An optimizer with one group for each tensor.
        momentum: What the average of the sensitivity keeps.
        max_gradient: Tensors whose gradient has an L1 norm of at most this are measured.
        keep_rates: Whether another tensor keeps the factor that it had last; else it has 0.
    """

    rates: Tensor

    @torch.inference_mode(False)
    def __init__(self, optimizer: Optimizer, *, momentum: float, max_gradient: float, keep_rates: bool) -> None:
        super().__init__()
        self.momentum, self.max_gradient, self.keep_rates = momentum, max_gradient, keep_rates
        tensors = [group["params"][0] for group in optimizer.param_groups]
        self.averages = BufferList(torch.zeros_like(tensor) for tensor in tensors)
        self.register_buffer("rates", tensors[0].new_zeros(len(tensors)))

    def measure(self, optimizer: Optimizer, loss: Tensor) -> tuple[list[Tensor], list[float]]:
        """Measure the sensitivity; the graph of the loss is kept.

        Args:
            optimizer: The optimizer; it takes no step.
            loss: The loss whose gradients are measured, the mean over the local rows.

        Returns:
            The next averages of the sensitivity, and the factor of each learning rate.
        """
        averages, factors = list(self.averages), (self.rates * self.keep_rates).tolist()
        for i, gradient in enumerate(batch_gradients(optimizer, loss)):
            if gradient is None or not gradient.abs().sum() <= self.max_gradient:
                continue
            latest = (optimizer.param_groups[i]["params"][0].detach() * gradient).abs()
            averages[i] = self.momentum * averages[i] + (1 - self.momentum) * latest
            factors[i] = float((((latest - averages[i]).abs() + 1e-8) / (averages[i] + 1e-8)).mean())
        return averages, factors

    @torch.no_grad()
    def update_(self, averages: list[Tensor], factors: list[float]) -> None:
        """Keep what :meth:`measure` returned.

        Args:
            averages: The averages of the sensitivity.
            factors: The factor of each learning rate.
        """
        self.averages.copy_(averages)
        self.rates.copy_(torch.tensor(factors, dtype=self.rates.dtype))
