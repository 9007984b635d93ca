"""PALM: entropy and consistency, with a learning rate for each tensor from its sensitivity."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ctta.core.hyperparameters import CommonArguments
from ctta.core.model import MethodInfo
from ctta.core.parallel import read
from ctta.core.state import BufferList
from ctta.core.validation import check_each, check_fraction, check_non_negative, check_positive
from ctta.functional import at_least_float32, confidence, cross_entropy, entropy, masked_mean
from ctta.methods.parts.prediction import StudentModel
from ctta.nn import find_norm_parameters
from ctta.nn.surgery import find_convolution_parameters, train_only_
from ctta.optim import OptimizerFactory, batch_gradients, scale_rates, split_groups_
from ctta.views import Views, check_views, draw_views, image_views


class SensitivityRates(nn.Module):
    """Factors of learning rates: how much the sensitivity of the weights of a tensor differs from its average.

    The sensitivity is the absolute value of weight times gradient; ``momentum`` is what its average keeps. Tensors
    whose gradient has an L1 norm above ``max_gradient`` are not measured: they keep their last factor, or have 0.
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
        """Return the next averages of the sensitivity, and the factor of each learning rate.

        The graph of the loss is kept. The optimizer, which takes no step, has one group for each tensor.
        """
        averages = list(self.averages)
        found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for i, gradient in enumerate(batch_gradients(optimizer, loss)):
            if gradient is None:
                continue
            latest = (optimizer.param_groups[i]["params"][0].detach() * gradient).abs()
            average = self.momentum * averages[i] + (1 - self.momentum) * latest
            factor = (((latest - average).abs() + 1e-8) / (average + 1e-8)).mean()
            found[i] = average, factor, gradient.abs().sum() <= self.max_gradient
        rates, *values = read(self.rates * self.keep_rates, *(value for each in found.values() for value in each[1:]))
        factors = rates.tolist()
        for (i, (average, *_)), factor, is_measured in zip(found.items(), values[::2], values[1::2], strict=True):
            if is_measured:
                averages[i], factors[i] = average, float(factor)
        return averages, factors

    @torch.no_grad()
    def update_(self, averages: list[Tensor], factors: list[float]) -> None:
        """Keep what :meth:`measure` returned."""
        self.averages.copy_(averages)
        self.rates.copy_(torch.tensor(factors, dtype=self.rates.dtype))


class PALM(StudentModel):
    """Minimize entropy and inconsistency, with a learning rate per tensor that depends on its sensitivity.

    Tensors learn where the gradient of the divergence from uniform predictions is small, at a rate that depends on how
    much the sensitivity of their weights differs from its average.

    Args:
        net: A network with convolutions or normalization layers; both are trained, with their biases.
        optimizer: A factory of the optimizer. The default is that for CIFAR10-C; for CIFAR100-C it has
            ``weight_decay=5e-4``, for ImageNet-C ``lr=5e-5``.
        temperature: Divides the logits for the sensitivity: 50, 100, 1000 for CIFAR10-C, CIFAR100-C, ImageNet-C.
        max_gradient: Tensors whose gradient has an L1 norm of at most this learn: 1, 0.5, 0.3 there.
        keep_rates: Whether another tensor keeps the learning rate that it had last, as in the authors' code, or rests.
        momentum: What the average of the sensitivity keeps: 0.5, 0.1, 0.5 there.
        max_entropy: The entropy in nats below which a prediction counts.
        consistency: The weight of the cross-entropy between prediction and view, per class.
        persistent_optimizer: Whether the optimizer keeps its state. The authors' code builds a new Adam in each step,
            and so follows the gradient's sign (default); their text says Adam.
        views: The view to agree with; the loss is averaged over several, and () switches it off.
        seed: The seed of the random views.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = PALM(net)(torch.rand(16, 3, 8, 8))

    Reference: Maharana, Zhang and Guo, "PALM: pushing adaptive learning rate mechanisms for continual test-time
    adaptation", AAAI 2025.
    """

    info = MethodInfo(
        "PALM", "Maharana et al., AAAI 2025", "norm layers and convolutions", "1 + views", 2, num_networks=2
    )
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=5e-4),
        temperature: float = 50.0,
        max_gradient: float = 1.0,
        keep_rates: bool = True,
        momentum: float = 0.5,
        max_entropy: float = 0.4,
        consistency: float = 0.01,
        persistent_optimizer: bool = False,
        views: Views = image_views(1),
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(net, **common)
        check_fraction("momentum", momentum)
        check_positive("temperature", temperature)
        check_each(check_non_negative, max_gradient=max_gradient, max_entropy=max_entropy, consistency=consistency)
        check_views(views)
        self.temperature, self.max_gradient, self.momentum = temperature, max_gradient, momentum
        self.max_entropy, self.consistency, self.views = max_entropy, consistency, views
        self.persistent_optimizer, self.keep_rates = persistent_optimizer, keep_rates
        self.student = self.copy_of_source()
        train_only_(self.student, find_norm_parameters(self.student) | find_convolution_parameters(self.student))
        self.optimize(self.student, optimizer)
        assert self.optimizer is not None
        split_groups_(self.optimizer)
        options = {"momentum": momentum, "max_gradient": max_gradient}
        self.sensitivity = SensitivityRates(self.optimizer, keep_rates=keep_rates, **options)

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        assert self.optimizer is not None
        logits = self.predict_step(x)
        flat = -(at_least_float32(logits) / self.temperature).log_softmax(1).sum(1).mean()
        averages, factors = self.sensitivity.measure(self.optimizer, flat)
        entropies = entropy(logits)
        loss = masked_mean(entropies, is_sure := entropies < self.max_entropy)
        views = draw_views(self.views, self.generator("views"))
        agreement = [cross_entropy(view(self.student, x), logits).mean() for view in views]  # gradients on both sides
        if agreement:
            loss = loss + self.consistency * logits.shape[1] * torch.stack(agreement).mean()
        sure = None if agreement else is_sure  # with views there is always something to learn from
        with scale_rates(self.optimizer, factors):
            if self.minimize(loss, confidence=confidence(logits.detach()).mean(), selected=sure):
                self.sensitivity.update_(averages, factors)
        if not self.persistent_optimizer:
            self.optimizer.state.clear()
        return logits
