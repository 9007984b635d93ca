"""The contract of :class:`ctta.AdaptiveModel` as named checks, for the methods here and for yours.

>>> import ctta
>>> ctta.testing.check_method(ctta.BNStats)
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ctta.base import AdaptiveModel
from ctta.testing import input_checks, network_checks, stream_checks
from ctta.testing.case import CHECKS, Case
from ctta.testing.networks import NETWORKS

__all__ = ["CHECKS", "NETWORKS", "Case", "check_method", "input_checks", "network_checks", "stream_checks"]


def check_method(
    method: type[AdaptiveModel],
    *,
    networks: Mapping[str, Callable[[], nn.Module]] | None = None,
    **hyperparameters: Any,
) -> None:
    """Run every check of the contract on every network; AssertionError names the first that fails, and where.

    Args:
        method: the class to check.
        networks: builders of small networks for images (N, 3, 16, 16), by name; by default a BatchNorm and a
            GroupNorm convolution network, a small vision transformer and a segmentation network.
        hyperparameters: passed to the method; fewer views make the checks of CoTTA faster.
    """
    for network, build in (networks or NETWORKS).items():
        for name, check in CHECKS.items():
            try:
                check(Case(method, build, hyperparameters))
            except Exception as error:
                error.add_note(f"contract check '{name}' of {method.__name__} on network '{network}'")
                raise
