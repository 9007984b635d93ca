"""The methods, one per file, and a function to build one by name."""

from typing import Any

from torch import nn

from ctta.base import AdaptiveModel
from ctta.methods.bn_stats import BNStats
from ctta.methods.cotta import CoTTA
from ctta.methods.pseudo_label import PseudoLabel
from ctta.methods.source import Source
from ctta.methods.tent import Tent
from ctta.methods.test_aug import TestAug
from ctta.validation import check_choice

__all__ = ["METHODS", "BNStats", "CoTTA", "PseudoLabel", "Source", "Tent", "TestAug", "adapt"]

#: Every method by its name, in the order of the CoTTA paper's tables.
METHODS: dict[str, type[AdaptiveModel]] = {
    "source": Source,
    "bn_stats": BNStats,
    "pseudo_label": PseudoLabel,
    "tent": Tent,
    "test_aug": TestAug,
    "cotta": CoTTA,
}


def adapt(net: nn.Module, method: str = "cotta", **hyperparameters: Any) -> AdaptiveModel:
    """Wrap a network in a method by name.

    Args:
        net: The network; it is copied and never changed.
        method: A key of :data:`METHODS`.
        **hyperparameters: Keyword arguments of the method.

    Returns:
        A model that predicts and adapts when it is called.

    Raises:
        ConfigError: There is no such method.

    >>> net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    >>> model = adapt(net, "bn_stats", batch_stats=0.5)
    """
    check_choice("method", method, tuple(METHODS))
    return METHODS[method](net, **hyperparameters)
