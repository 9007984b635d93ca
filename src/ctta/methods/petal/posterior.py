"""A Gaussian posterior over the weights of a network, from snapshots of its training (SWAG-diagonal)."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ctta.errors import ConfigError, InputError
from ctta.nn.surgery import fingerprint, unwrap
from ctta.source_stats import SourceStats


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
    means = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
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
            difference = state[name].to(mean) - mean
            mean += difference / count
            squares[name] += difference * (state[name].to(mean) - mean)
    if count == 0:
        raise InputError("no snapshots to compute a posterior from: give the state_dict of each epoch, say")
    found = {f"posterior.mean/{name}": value.to(parameters[name]) for name, value in means.items()}
    found |= {f"posterior.variance/{name}": (value / count).to(parameters[name]) for name, value in squares.items()}
    tensors = {name: value.cpu() for name, value in found.items()}
    return SourceStats(tensors, fingerprint=fingerprint(net), num_images=0, is_labeled=False)


def negative_log_density(net: nn.Module, posterior: SourceStats, eps: float = 1e-6) -> Tensor:
    """Return -log of the posterior's density at the trained weights of a network, up to a constant.

    Args:
        net: The network.
        posterior: What :func:`weight_posterior` returned.
        eps: Added to the variances; the default is PETAL's.

    Returns:
        A scalar.
    """
    means, variances = posterior.by_name("posterior.mean"), posterior.by_name("posterior.variance")
    weights = {name: value for name, value in net.named_parameters() if value.requires_grad}
    terms = [((value - means[name]).square() / (variances[name] + eps)).sum() for name, value in weights.items()]
    return torch.stack(terms).sum() / 2


def select_posterior(posterior: SourceStats, net: nn.Module) -> SourceStats:
    """Return a copy of a posterior for a method to keep.

    Args:
        posterior: The hyperparameter.
        net: The source network.

    Returns:
        The statistics ``posterior.mean`` and ``posterior.variance``.

    Raises:
        ConfigError: It is none, or one of another network.
    """
    if not isinstance(posterior, SourceStats):
        raise TypeError(f"posterior must come from ctta.weight_posterior, got {type(posterior).__name__}")
    names = ("posterior.mean", "posterior.variance")
    if not {*names} <= {*posterior.names}:
        raise ConfigError("these statistics are no posterior of the weights: compute it with ctta.weight_posterior")
    posterior.verify(net)
    return posterior.select(names, "PETAL")
