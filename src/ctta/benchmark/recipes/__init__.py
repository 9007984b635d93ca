"""Recipes of benchmarks by name; each is a function from options to a task."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from ctta.benchmark.recipes.base import BenchmarkOptions, BenchmarkTask, MethodSpec, Preset, apply_settings
from ctta.benchmark.recipes.embedded import ablation, demo, embedded, embedded_gradual
from ctta.benchmark.recipes.paper import cifar10c, cifar10c_gradual, cifar100c, imagenetc
from ctta.benchmark.recipes.segmentation import acdc, streets
from ctta.errors import ConfigError
from ctta.streams import Stream, rounds
from ctta.validation import check_choice, check_integer

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
}


def build_task(recipe: str, options: BenchmarkOptions) -> BenchmarkTask:
    """Build the task of a recipe with the user's options applied.

    Args:
        recipe: A key of :data:`RECIPES`.
        options: What the user changes about the recipe.

    Returns:
        The task; its network and streams are built on demand.

    Raises:
        ConfigError: There is no such recipe, or an option does not fit it.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
    check_choice("preset", options.preset, get_args(Preset))
    for name in ("limit", "batch_size", "rounds"):
        if (value := getattr(options, name)) is not None:
            check_integer(name, value, 1)
    task = RECIPES[recipe](options)
    num_rounds = options.rounds or task.rounds

    def make_stream(order: int | None) -> Stream:
        stream = task.make_stream(order)
        return rounds(stream, num_rounds) if num_rounds > 1 else stream

    return replace(task, methods=apply_settings(task.methods, options.settings), make_stream=make_stream)
