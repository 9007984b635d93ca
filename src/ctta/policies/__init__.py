"""What happens around the updates of a method: restoring, averaging and resetting, combinable with any method.

>>> import ctta, torch
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
>>> model = ctta.adapt(net, "tent", policies=[ctta.policies.reset_every(1000)])
>>> model = ctta.Tent(net, policies=[ctta.policies.average_with_source(0.99), ctta.policies.restore(0.01)])

On the command line it is ``--policy reset_every=1000``. Policies act in the order of the list. Methods that are a
combination are built from them: RDumb is ETA with :data:`reset_every`, ROID has :data:`average_with_source`. To write
one, extend :class:`ctta.policies.Policy`; a checkpoint holds the policies of this package.
"""

import inspect
from typing import Any

from ctta.core.hyperparameters import parse_hyperparameters
from ctta.core.updates import Policy
from ctta.errors import ConfigError, did_you_mean
from ctta.policies.resetting import AdaptiveReset, ResetEvery, ResetOnLowEntropy
from ctta.policies.restoring import AverageWithSource, FrozenTeacher, Kalman, Restore, RestoreByFisher
from ctta.policies.skipping import UpdateWhen

__all__ = [
    "POLICIES",
    "AdaptiveReset",
    "AverageWithSource",
    "FrozenTeacher",
    "Kalman",
    "Policy",
    "ResetEvery",
    "ResetOnLowEntropy",
    "Restore",
    "RestoreByFisher",
    "UpdateWhen",
    "adaptive_reset",
    "average_with_source",
    "format_policy",
    "frozen_teacher",
    "kalman",
    "parse_policy",
    "reset_every",
    "reset_on_low_entropy",
    "restore",
    "restore_by_fisher",
    "update_when",
]

# The names by which settings read as verbs: policies=[restore(0.01), reset_every(1000)].
restore = Restore
restore_by_fisher = RestoreByFisher
average_with_source = AverageWithSource
kalman = Kalman
frozen_teacher = FrozenTeacher
reset_every = ResetEvery
reset_on_low_entropy = ResetOnLowEntropy
adaptive_reset = AdaptiveReset
update_when = UpdateWhen

#: Every policy by its name.
POLICIES: dict[str, Any] = {
    cls.name: cls
    for cls in (
        Restore,
        RestoreByFisher,
        AverageWithSource,
        Kalman,
        FrozenTeacher,
        ResetEvery,
        ResetOnLowEntropy,
        AdaptiveReset,
        UpdateWhen,
    )
}


def parse_policy(text: str) -> Policy:
    """Return a policy from a text, as ``--policy`` takes it.

    Args:
        text: The name; after ``=`` the value of its first setting, and after commas other settings by name. What is
            left out has its default.

    Returns:
        The policy.

    Raises:
        ConfigError: There is no such policy or setting, or a value is not allowed.

    >>> parse_policy("reset_every=64000,unit=images")
    reset_every(num=64000, unit='images')
    >>> parse_policy("kalman,noise=0.01").gamma
    0.99
    """
    first, *settings = (part.strip() for part in text.split(","))
    name, equals, value = (part.strip() for part in first.partition("="))
    if name not in POLICIES:
        raise ConfigError(
            f"there is no policy {name!r}{did_you_mean(name, POLICIES)}; expected one of {', '.join(POLICIES)}"
        )
    policy = POLICIES[name]
    names = list(inspect.signature(policy).parameters)
    if equals and not names:
        raise ConfigError(f"{name} has no settings, got {text!r}: leave out {first.removeprefix(name)!r}")
    if equals:
        settings = [f"{names[0]}={value}", *settings]
    found: Policy = policy(**parse_hyperparameters(policy, settings, owner=name))
    return found


def format_policy(policy: Policy) -> str:
    """Return a policy as text.

    Args:
        policy: A policy of the library.

    Returns:
        What :func:`parse_policy` takes.

    >>> from ctta.policies import reset_every
    >>> format_policy(reset_every(500))
    'reset_every,num=500,unit=batches'
    """
    return ",".join([policy.name, *(f"{name}={value}" for name, value in vars(policy).items())])
