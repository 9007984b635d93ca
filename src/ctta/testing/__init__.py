"""The contract of :class:`ctta.AdaptiveModel` as named checks, to run against any method.

Every method of the library passes them, and a new method gets them for free:

>>> import ctta
>>> ctta.testing.check_method(ctta.BNStats)    # doctest: +ELLIPSIS
BNStats: ... checks on each of 4 networks passed; it has no optimizer and takes no steps

Each check is a function ``check_...(case)`` in :data:`CHECKS`, where ``case`` is a :class:`ContractCase`: a method with
its hyperparameters on a small network. A test suite can run them one by one:

>>> case = ctta.testing.ContractCase(ctta.Tent, ctta.testing.NETWORKS["batch_norm"], {})
>>> ctta.testing.CHECKS["check_reset_equals_new"](case)
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn

from ctta.core.hyperparameters import format_hyperparameters
from ctta.core.model import AdaptiveModel
from ctta.testing import input_checks, stream_checks
from ctta.testing.case import CHECKS, LONG_STREAM, SHORT_STREAM, ContractCase, count_learned_batches
from ctta.testing.networks import NETWORKS, VISION_TRANSFORMERS

__all__ = [
    "CHECKS",
    "NETWORKS",
    "ContractCase",
    "check_method",
    "input_checks",
    "select_networks",
    "select_settings",
    "stream_checks",
]


def select_networks(method: type[AdaptiveModel]) -> dict[str, Callable[[], nn.Module]]:
    """Return the networks that the contract of a method is checked on.

    Args:
        method: The class.

    Returns:
        From :data:`NETWORKS` a convolutional network with BatchNorm and one with GroupNorm, a vision transformer and,
        if the method adapts such networks (``info.labels_pixels``), a segmentation network. For a method that adapts
        vision transformers only (``info.needs_vit``), one that is made of blocks with a class token.
    """
    if method.info is not None and method.info.needs_vit:
        return VISION_TRANSFORMERS
    labels_pixels = method.info is None or method.info.labels_pixels
    return {name: make for name, make in NETWORKS.items() if name != "segmentation" or labels_pixels}


def select_settings(method: type[AdaptiveModel]) -> dict[str, Any]:
    """Return the hyperparameters that the contract of a method is checked with.

    Args:
        method: The class.

    Returns:
        Those of ``check_settings`` that its constructor takes: a subclass may have fixed some.
    """
    parameters = signature(method).parameters
    return {name: value for name, value in method.check_settings.items() if name in parameters}


def check_method(
    method: type[AdaptiveModel],
    *,
    networks: Mapping[str, Callable[[], nn.Module]] | None = None,
    allow_no_steps: bool = False,
    **hyperparameters: Any,
) -> None:
    """Run every check of the contract on every network, and print what was checked.

    A method with an optimizer must learn from a batch on at least one network: checks of reset, saving and resuming
    prove nothing about weights that never change. A method with many views or a large memory declares smaller ones as
    its class attribute ``check_settings``, so that the checks are quick and three batches of six images fill it.

    Args:
        method: The class to check.
        networks: Factories of small networks for images (N, 3, 16, 16), by name; by default those of
            :func:`select_networks`.
        allow_no_steps: Whether a method with an optimizer may leave its weights as they are on all networks, such as
            one that selects samples and finds none among random images.
        **hyperparameters: Passed to the method, such as ``memory_size=8`` for one with a memory; they go before
            ``check_settings``.

    Raises:
        TypeError: This is no class of a method.
        AssertionError: A promise of the contract is broken. A note names the check and the network.
    """
    if not (isinstance(method, type) and issubclass(method, AdaptiveModel)):
        raise TypeError(f"expected a class that extends ctta.AdaptiveModel, such as ctta.Tent, got {method!r}")
    networks, num_learned = networks or select_networks(method), {}
    settings = {**select_settings(method), **hyperparameters}
    with _one_thread():
        for number, (network, make_network) in enumerate(networks.items()):
            case = ContractCase(method, make_network, settings, SHORT_STREAM if number else LONG_STREAM)
            for name, check in CHECKS.items():
                with _noting(f"{name} of {method.__name__} on network '{network}'"):
                    check(case)
            with _noting(f"a stream of {method.__name__} on network '{network}'"):
                num_learned[network] = count_learned_batches(case)
    if not allow_no_steps and any(number is not None for number in num_learned.values()):
        assert any(num_learned.values()), (
            f"{method.__name__} has an optimizer, but its weights stayed the same over 3 batches on every network "
            f"({', '.join(networks)}), so nothing that it learns was checked: call self.minimize(loss) in adapt_step, "
            "pass hyperparameters with which it learns from three batches of six random images, such as "
            "memory_size=8, or declare allow_no_steps=True"
        )
    summary = (
        f"{len(CHECKS)} checks on {f'each of {len(networks)} networks' if len(networks) > 1 else '1 network'} passed"
    )
    checked_with = f" with {format_hyperparameters(settings)}" if settings else ""
    is_episodic = method.info is not None and method.info.is_episodic
    steps = f"{_describe_steps(num_learned)}{', none of which lasts' if is_episodic else ''}"
    sys.stdout.write(f"{method.__name__}{checked_with}: {summary}; {steps}\n")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread: on networks this small, threads wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _noting(note: str) -> Iterator[None]:
    """Add a note to an error, and a text to an assertion that has none."""
    try:
        yield
    except AssertionError as error:
        if not str(error):
            error.args = (f"{note} failed: see the line in the traceback",)
        error.add_note(note)
        raise
    except Exception as error:
        error.add_note(note)
        raise


def _describe_steps(num_learned: Mapping[str, int | None]) -> str:
    """Return in how many of the three batches of each network the method learned."""
    numbers = [number for number in num_learned.values() if number is not None]
    if not numbers:
        return "it has no optimizer and takes no steps"
    if len({*numbers}) == 1:
        text = f"{numbers[0]} step{'s' if numbers[0] != 1 else ''} taken"
        return f"{text} in each" if len(num_learned) > 1 else text
    return "steps taken: " + ", ".join(f"{number or 0} in {network}" for network, number in num_learned.items())
