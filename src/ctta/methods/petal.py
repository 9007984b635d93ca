"""PETAL: a self-trained student with a prior over its weights, restored where its gradient is small."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import CommonArguments
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.core.parallel import current_reducer, read_flags
from ctta.core.validation import check_fraction, check_non_negative, check_number
from ctta.errors import ConfigError, InputError
from ctta.functional import at_least_float32, confidence, cross_entropy, ema_update_
from ctta.nn.surgery import fingerprint, unwrap
from ctta.optim import OptimizerFactory
from ctta.policies import restore_by_fisher
from ctta.source_stats import SourceStats
from ctta.views import Views, average_views, check_views, draw_views, image_views


@torch.no_grad()
def weight_posterior(net: nn.Module, snapshots: Iterable[nn.Module | Mapping[str, Tensor]]) -> SourceStats:
    """Compute mean and variance of every weight over snapshots of a training that continued on source images.

    Its variance is the diagonal of SWAG's covariance.

    Args:
        net: The network to adapt.
        snapshots: Networks or state dictionaries, which are read one after the other.

    Returns:
        A posterior for ``ctta.PETAL(net, posterior=...)``; ``save`` writes them to a file.

    Raises:
        InputError: There are no snapshots, or one does not fit the network.

    >>> net = nn.Linear(4, 3)
    >>> snapshots = [nn.Linear(4, 3) for _ in range(3)]
    >>> weight_posterior(net, snapshots).by_name("posterior.mean")["bias"].shape
    torch.Size([3])
    """
    net = unwrap(net)
    parameters = dict(net.named_parameters())
    # On the CPU, since other devices may lack float64.
    means = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in parameters.items()}
    squares = {name: torch.zeros_like(value) for name, value in means.items()}
    count = 0
    for snapshot in snapshots:
        state = unwrap(snapshot).state_dict() if isinstance(snapshot, nn.Module) else snapshot
        count += 1
        for name, mean in means.items():
            if name not in state or state[name].shape != mean.shape:
                raise InputError(
                    f"snapshot {count} has no weights {name!r} of shape {tuple(mean.shape)}: give snapshots of the "
                    "same architecture"
                )
            # Welford's recurrence, since the square of the mean would cancel the mean of the squares.
            value = state[name].cpu().double()
            difference = value - mean
            mean += difference / count
            squares[name] += difference * (value - mean)
    if count == 0:
        raise InputError("no snapshots to compute a posterior from: give for example the state_dict of each epoch")
    tensors = {f"posterior.mean/{name}": value.to(parameters[name].dtype) for name, value in means.items()}
    for name, value in squares.items():
        tensors[f"posterior.variance/{name}"] = (value / count).to(parameters[name].dtype)
    return SourceStats(tensors, fingerprint=fingerprint(net), num_images=0, is_labeled=False)


def negative_log_density(net: nn.Module, posterior: SourceStats, eps: float = 1e-6) -> Tensor:
    """Return -log of the posterior's density at the trained weights of a network, up to a constant."""
    means, variances = posterior.by_name("posterior.mean"), posterior.by_name("posterior.variance")
    weights = {name: value for name, value in net.named_parameters() if value.requires_grad}
    terms = [((value - means[name]).square() / (variances[name] + eps)).sum() for name, value in weights.items()]
    return torch.stack(terms).sum() / 2


def select_posterior(posterior: SourceStats, net: nn.Module) -> SourceStats:
    """Return a copy of a posterior for a method to keep; raise unless it is one of the source network ``net``."""
    if not isinstance(posterior, SourceStats):
        raise TypeError(f"posterior must come from ctta.weight_posterior, got {type(posterior).__name__}")
    names = ("posterior.mean", "posterior.variance")
    if not {*names} <= {*posterior.names}:
        raise ConfigError("these statistics are no posterior of the weights: compute it with ctta.weight_posterior")
    posterior.verify(net)
    return posterior.select(names, "PETAL")


class PETAL(AdaptiveModel):
    """Train a student on its moving average, near the source's posterior; restore weights with small gradients.

    The target is that of CoTTA. The loss has the negative log density of a Gaussian posterior over the weights, and
    after each step the weights with the smallest squared gradients are restored.

    Args:
        net: Any network; every parameter that requires grad is trained and restored.
        posterior: The posterior over the weights, :func:`ctta.weight_posterior`. Without it the loss has no prior.
        prior_weight: The weight of the prior.
        decay: The fraction of itself that the teacher keeps at each step.
        restore_quantile: Weights with a squared gradient below this quantile of all are restored; 0 for none. For the
            paper's variant with random restoring add ``policies=[ctta.policies.restore(0.01)]``.
        threshold: Views are averaged where the source's mean confidence is lower: 0.92 for CIFAR10-C (default), 0.72
            for CIFAR100-C.
        views: What to average over, () for nothing; see :mod:`ctta.views`.
        seed: The seed of the random views.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    >>> logits = PETAL(net, views=image_views(4))(torch.rand(16, 3, 8, 8))

    Reference: Brahma and Rai, "A probabilistic framework for lifelong test-time adaptation", CVPR 2023.
    """

    info = MethodInfo(
        "PETAL",
        paper="Brahma and Rai, CVPR 2023",
        trains="all weights",
        forward_passes="3, or 2 + views",
        backward_passes=1,
        num_networks=3,
    )
    checks_values_late = True
    check_settings: ClassVar = {"views": image_views(1)}

    def __init__(
        self,
        net: nn.Module,
        *,
        posterior: SourceStats | None = None,
        optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3),
        prior_weight: float = 1e-9,
        decay: float = 0.999,
        restore_quantile: float = 0.03,
        threshold: float = 0.92,
        views: Views = image_views(32),
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(net, **common)
        check_non_negative("prior_weight", prior_weight)
        check_fraction("decay", decay)
        check_number("threshold", threshold)
        check_views(views)
        self.prior_weight, self.decay, self.threshold, self.views = prior_weight, decay, threshold, views
        self.restore_quantile = restore_quantile
        self.posterior = None if posterior is None else select_posterior(posterior, self.source)
        self.student, self.teacher = self.copy_of_source(), self.copy_of_source().requires_grad_(False)
        self.optimize(self.student, optimizer)
        self.use_policies(restore_by_fisher(restore_quantile))

    @override
    def adapt_step(self, x: Tensor) -> Tensor:
        target, source_confidence = self._compute_target(x)
        loss = cross_entropy(self.student(x), target).mean()
        if self.posterior is not None:
            loss = loss + self.prior_weight * negative_log_density(self.student, self.posterior)
        if self.minimize(loss, confidence=source_confidence):
            ema_update_(self.teacher, self.student, self.decay**self.step_scale)
        return target

    @override
    def predict_step(self, x: Tensor) -> Tensor:
        return self._compute_target(x)[0]

    @torch.no_grad()
    def _compute_target(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's prediction, averaged over views if the source is uncertain, and its confidence."""
        source_confidence = confidence(self.source(x)).mean()
        if read_flags(current_reducer().mean(source_confidence) < self.threshold)[0]:
            views = draw_views(self.views, self.generator("views"))
            if views:
                return average_views(views, self.teacher, x, "logits"), source_confidence
        return at_least_float32(self.teacher(x)), source_confidence
