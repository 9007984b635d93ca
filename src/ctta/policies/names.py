"""Policies by name, and as a user types them: ``reset_every=1000``."""

from dataclasses import fields

from ctta.core.hyperparameters import parse_hyperparameters
from ctta.core.steps import Policy
from ctta.errors import ConfigError, did_you_mean
from ctta.policies.averaging import AverageWithSource, FrozenTeacher, Kalman
from ctta.policies.resetting import AdaptiveReset, ResetEvery, ResetOnLowEntropy
from ctta.policies.restoring import Restore, RestoreByFisher

BuiltIn = (
    Restore
    | RestoreByFisher
    | AverageWithSource
    | Kalman
    | FrozenTeacher
    | ResetEvery
    | ResetOnLowEntropy
    | AdaptiveReset
)

#: Every policy by its name.
POLICIES: dict[str, type[BuiltIn]] = {
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
    names = [field.name for field in fields(policy)]
    if equals and not names:
        raise ConfigError(f"{name} has no settings, got {text!r}: leave out {first.removeprefix(name)!r}")
    if equals:
        settings = [f"{names[0]}={value}", *settings]
    return policy(**parse_hyperparameters(policy, settings, owner=name))


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
