"""UnMix-TNS: normalize each image by its own statistics mixed with those of components that follow the stream."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.core.hyperparameters import PassArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import change_call, current_call, current_reducer
from ctta.core.validation import check_each, check_fraction, check_integer, check_positive
from ctta.nn import BatchStatistics, NormHook, attach_norm_hooks_, renormalize
from ctta.nn.moments import image_var_mean

#: How much of the source's variance is between the components at the start; the rest is within them.
BETWEEN_COMPONENTS = 0.5


class Assignment(NamedTuple):
    """How the images of a batch relate to the components of a layer.

    Attributes:
        shares: The probability of each component for each image (N, K).
        means: The mean of each image (N, C).
        variances: The variance of each image (N, C).
    """

    shares: Tensor
    means: Tensor
    variances: Tensor


@dataclass(frozen=True, eq=False)
class MixedStatistics(NormHook):
    """A forward pre-hook of a BatchNorm that mixes the statistics of each image with those of fixed components.

    A layer without spatial axes keeps the source's statistics.

    Attributes:
        means: Means of the components (K, C).
        variances: Variances of the components (K, C).
        temperature: Temperature of the probabilities of components.
    """

    is_traceable = True
    means: Tensor
    variances: Tensor
    temperature: float

    @override
    def before(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        x = inputs[0]
        return (self.normalize(layer, x)[0], *inputs[1:]) if x.ndim > 2 else None

    def normalize(self, layer: _BatchNorm, x: Tensor) -> tuple[Tensor, Assignment]:
        """Return the rescaled input, and how its images relate to the components."""
        assert layer.running_mean is not None, "checked when the method is built"
        values = x.to(layer.running_mean.dtype)
        if torch.compiler.is_compiling():  # the other way depends on the number of images
            variances, means = torch.var_mean(values, tuple(range(2, x.ndim)), correction=0)
        else:
            variances, means = image_var_mean(values)
        centers, spreads = self.means.to(means), self.variances.to(means)
        similarity = F.normalize(means) @ F.normalize(centers).T
        found = Assignment((similarity / self.temperature).softmax(1), means, variances)
        shares = found.shares.unsqueeze(2)  # N, K, C from here on
        mixed_means = centers + shares * (means.unsqueeze(1) - centers)
        mixed_variances = spreads + shares * (variances.unsqueeze(1) - spreads)
        mean, variance = mixed_means.mean(1), mixed_variances.mean(1) + mixed_means.var(1, correction=0)
        each_image = (*mean.shape, *[1] * (x.ndim - 2))
        rescaled = renormalize(layer, values, mean.view(each_image), variance.view(each_image), x.ndim - 2)
        return rescaled.to(x.dtype), found


@dataclass(frozen=True)
class StoredComponents(NormHook):
    """The same with the components that a layer has as buffers, so that its ``state_dict`` holds them.

    Attributes:
        temperature: Temperature of the probabilities of components.
    """

    is_traceable = True
    temperature: float

    @override
    def before(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        means, variances = layer.get_buffer("component_means"), layer.get_buffer("component_variances")
        return MixedStatistics(means, variances, self.temperature).before(layer, inputs)


class UnmixedStatistics(NormHook, nn.Module):
    """The same with components that follow the batches of calls that track."""

    means: Tensor
    variances: Tensor

    def __init__(self, layer: _BatchNorm, settings: "UnMixTNS", generator: torch.Generator) -> None:
        super().__init__()
        assert layer.running_mean is not None and layer.running_var is not None, "checked when the method is built"
        num, between = settings.num_components, BETWEEN_COMPONENTS if settings.num_components > 1 else 0.0
        self.momentum, self.max_batch_size = settings.momentum, settings.max_batch_size
        self.temperature = settings.temperature
        noise = torch.randn(num, len(layer.running_mean), generator=generator, dtype=torch.float64)
        spread = (between * num / max(num - 1, 1) * layer.running_var).sqrt()
        self.register_buffer("means", layer.running_mean + spread * noise.to(spread))
        self.register_buffer("variances", ((1 - between) * layer.running_var).expand(num, -1).clone())

    @property
    def current(self) -> MixedStatistics:
        """The hook for the components as they are now, until the next update."""
        return MixedStatistics(self.means, self.variances, self.temperature)

    @override
    def before(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        BatchStatistics.set_mode_(layer, by_layer=False)
        x = inputs[0]
        if x.ndim == 2:
            return None
        rescaled, found = self.current.normalize(layer, x)
        if current_call().is_tracking:
            self.update_(found)
        return (rescaled, *inputs[1:])

    @torch.no_grad()
    def update_(self, found: Assignment) -> None:
        """Move the components toward the images of a batch, each by the share that it has in them."""
        batch = current_reducer()
        rate = 1 - (1 - self.momentum) ** (batch.total_count(len(found.shares)) / self.max_batch_size)
        weight, num_images = batch.mean(found.shares.mean(0)).unsqueeze(1), len(found.shares)
        for buffer, own in ((self.means, found.means), (self.variances, found.variances)):
            moved = buffer + rate * (batch.mean(found.shares.T @ own / num_images) - weight * buffer)
            buffer.copy_(torch.where(moved.isfinite().all(), moved, buffer))  # one overflow would stay forever


class UnMixTNS(AdaptiveModel):
    """Normalize each image by statistics of its own and of components that follow the stream; nothing is trained.

    Made for streams of correlated labels and batches of any size: an image does not depend on the others of its batch.

    Args:
        net: A network with BatchNorm; other layers stay as they are.
        num_components: The number of components of each layer: 16, and 128 for mixed domains.
        momentum: How far a batch of ``max_batch_size`` images moves the components.
        max_batch_size: The batch size that ``momentum`` is for; smaller batches move the components less. The reference
            has 16 for ImageNet-C.
        temperature: Temperature of the probabilities of components.
        seed: The seed of the first components.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = UnMixTNS(net)(torch.rand(4, 3, 8, 8))

    Reference: Tomar et al., "Un-mixing test-time normalization statistics: combatting label temporal correlation",
    ICLR 2024.
    """

    info = MethodInfo("UnMix-TNS", "Tomar et al., ICLR 2024", "norm statistics", num_networks=2, starts_random=True)
    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        num_components: int = 16,
        momentum: float = 0.1,
        max_batch_size: int = 64,
        temperature: float = 0.07,
        seed: int = 0,
        **common: Unpack[PassArguments],
    ) -> None:
        super().__init__(net, batch_stats=0.0, seed=seed, **common)
        check_fraction("momentum", momentum)
        check_each(check_positive, temperature=temperature)
        self.num_components = check_integer("num_components", num_components, 1)
        self.max_batch_size = check_integer("max_batch_size", max_batch_size, 1)
        self.momentum, self.temperature = momentum, temperature
        self.student = self.copy_of_source().requires_grad_(False)
        generator = self.generator("components")
        self.components = attach_norm_hooks_(self.student, lambda layer: UnmixedStatistics(layer, self, generator))

    @override
    @torch.no_grad()
    def adapt_step(self, x: Tensor) -> Tensor:
        with change_call(is_tracking=True):
            logits: Tensor = self.student(x)
        return logits

    @override
    @torch.no_grad()
    def predict_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        return logits

    @override
    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """Return the network with the components as they are, which exports like any network.

        Its BatchNorms have them as two further buffers, so that its ``state_dict`` fits a deployed network only.

        Args:
            batches: Inputs to estimate BatchNorm's running statistics from, which then replace the components.

        Returns:
            A plain network.
        """
        net = super().deploy(batches)
        if batches is None:
            remaining = iter(self.components)

            def store_components_(layer: _BatchNorm) -> NormHook:
                components = next(remaining)
                layer.register_buffer("component_means", components.get_buffer("means").clone())
                layer.register_buffer("component_variances", components.get_buffer("variances").clone())
                return StoredComponents(self.temperature)

            attach_norm_hooks_(net, store_components_)
        return net
