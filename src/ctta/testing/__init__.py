"""The contract of :class:`ctta.AdaptiveModel` as named checks, to run against any method.

Every method of the library passes them, and a new method gets them for free:

>>> import ctta
>>> ctta.testing.check_method(ctta.BNStats)

Each check is a function ``check_...(case)`` in :data:`CHECKS`, where ``case`` is a :class:`ContractCase`: a method with
its hyperparameters on a small network. A test suite can run them one by one:

>>> case = ctta.testing.ContractCase(ctta.Tent, ctta.testing.NETWORKS["batch_norm"], {})
>>> ctta.testing.CHECKS["check_reset_equals_new"](case)
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ctta.base import AdaptiveModel
from ctta.testing import input_checks, network_checks, stream_checks
from ctta.testing.case import CHECKS, ContractCase
from ctta.testing.networks import NETWORKS

__all__ = ["CHECKS", "NETWORKS", "ContractCase", "check_method", "input_checks", "network_checks", "stream_checks"]


def check_method(
    method: type[AdaptiveModel],
    *,
    networks: Mapping[str, Callable[[], nn.Module]] | None = None,
    **hyperparameters: Any,
) -> None:
    """Run every check of the contract on every network.

    Args:
        method: The class to check.
        networks: Factories of small networks for images (N, 3, 16, 16), by name; by default :data:`NETWORKS`: a
            convolutional network with BatchNorm and one with GroupNorm, a vision transformer and a segmentation
            network.
        **hyperparameters: Passed to the method; fewer views make the checks of CoTTA faster.

    Raises:
        AssertionError: A promise of the contract is broken. A note names the check and the network.
    """
    for network, make_network in (networks or NETWORKS).items():
        for name, check in CHECKS.items():
            try:
                check(ContractCase(method, make_network, hyperparameters))
            except Exception as error:
                error.add_note(f"{name} of {method.__name__} on network '{network}'")
                raise
