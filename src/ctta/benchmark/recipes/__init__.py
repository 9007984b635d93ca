"""Recipes of benchmarks by name; each is a function from options to a task."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from torch import nn

from ctta.benchmark.options import BenchmarkOptions, Preset
from ctta.benchmark.recipes.base import BenchmarkTask, MethodSpec, add_methods, add_source_stats, apply_changes
from ctta.benchmark.recipes.ccc import ccc
from ctta.benchmark.recipes.images import (
    ablation,
    cifar10c,
    cifar10c_gradual,
    cifar100,
    cifar100c,
    demo,
    embedded,
    embedded_gradual,
    folder,
    imagenet_val,
    imagenetc,
    pacs,
)
from ctta.benchmark.recipes.segmentation import acdc, cityscapes_c, streets
from ctta.core.hyperparameters import load_stats_setting
from ctta.core.validation import check_choice, check_integer
from ctta.data.corruptions.registry import check_severity
from ctta.data.streams import ChosenProtocol, Stream, parse_protocol, rounds
from ctta.errors import ConfigError, did_you_mean
from ctta.models import normalize_input

__all__ = ["RECIPES", "BenchmarkOptions", "BenchmarkTask", "MethodSpec", "Preset", "build_task"]

RECIPES: dict[str, Callable[[BenchmarkOptions], BenchmarkTask]] = {
    "demo": demo,
    "embedded": embedded,
    "embedded-gradual": embedded_gradual,
    "ablation": ablation,
    "streets": streets,
    "cifar10c": cifar10c,
    "cifar10c-gradual": cifar10c_gradual,
    "cifar100c": cifar100c,
    "imagenetc": imagenetc,
    "acdc": acdc,
    "cityscapes-c": cityscapes_c,
    "cifar100": cifar100,
    "imagenet-val": imagenet_val,
    "pacs": pacs,
    "folder": folder,
    "ccc": ccc,
}


def build_task(
    recipe: str, options: BenchmarkOptions, methods: Sequence[str] = (), *, ignore_other_settings: bool = False
) -> BenchmarkTask:
    """Build the task of a recipe with the user's options applied.

    Args:
        recipe: A key of :data:`RECIPES`.
        options: What the user changes about the recipe.
        methods: Further methods that are not of the recipe, by their names in :mod:`ctta.core.registry`.
        ignore_other_settings: Whether ``options.settings`` and ``options.policies`` may name methods that the task does
            not have.

    Returns:
        The task; its network and streams are built on demand.

    Raises:
        ConfigError: There is no such recipe, or an option does not fit it.
    """
    if recipe not in RECIPES:
        raise ConfigError(
            f"there is no recipe {recipe!r}{did_you_mean(recipe, RECIPES)}; choose one of {', '.join(RECIPES)}"
        )
    check_choice("preset", options.preset, get_args(Preset))
    for name in ("limit", "batch_size", "rounds", "speed", "num_images"):
        if (value := getattr(options, name)) is not None:
            check_integer(name, value, 1)
    if options.severity is not None:
        check_severity(options.severity)
    protocol = None if options.protocol is None else parse_protocol(options.protocol)
    if protocol is not None:
        options = _fix_batch_size(options, protocol)
    task = RECIPES[recipe](options)
    for name in ("corruptions", "severity", "size", "classes", "protocol", "target", "speed", "num_images"):
        if getattr(options, name) is not None and name not in task.accepts:
            raise ConfigError(f"the recipe {recipe!r} does not take the option {name!r}: leave it out")
    if protocol is not None and protocol.definition.order != "recipe":
        # The orders are those of the corruptions, which have severities; other domains have one order.
        has_orders = options.corruptions is None and "severity" in task.accepts
        order = protocol.definition.order if has_orders else None
        task = replace(task, default_orders=(order,))
    num_rounds = options.rounds or task.rounds
    # A protocol repeats its stream by itself, as it draws every round anew.
    repeats = num_rounds > 1 and "protocol" not in task.accepts

    def make_stream(order: int | None) -> Stream:
        stream = task.make_stream(order)
        return rounds(stream, num_rounds) if repeats else stream

    def make_network() -> nn.Module:
        return normalize_input(task.make_network(), options.model or recipe, options.mean, options.std)

    specs = add_methods(task.methods, methods)
    if options.source_stats is not None:
        stats = load_stats_setting("source_stats", str(options.source_stats))
        specs = add_source_stats(specs, lambda _method: stats)
    elif task.load_stats is not None:
        specs = add_source_stats(specs, task.load_stats)
    policies = tuple(map(str, options.policies or ()))
    specs = apply_changes(specs, tuple(options.settings), policies, ignore_others=ignore_other_settings)
    if options.amp is not None:
        specs = {name: replace(spec, settings={**spec.settings, "amp": options.amp}) for name, spec in specs.items()}
    return replace(task, methods=specs, make_stream=make_stream, make_network=make_network)


def _fix_batch_size(options: BenchmarkOptions, protocol: ChosenProtocol) -> BenchmarkOptions:
    """Return the options with the batch size that defines a protocol, which settings of methods depend on."""
    if (batch_size := protocol.definition.batch_size) is None:
        return options
    if options.batch_size not in (None, batch_size):
        raise ConfigError(
            f"the protocol {protocol.name!r} has batches of {batch_size}, got the option 'batch_size' "
            f"{options.batch_size}: leave one of them out"
        )
    return replace(options, batch_size=batch_size)
