"""The paper's tasks and the embedded ones, by name; each is a function of a few lines."""

from collections.abc import Callable
from dataclasses import replace

from ctta.benchmark.recipes.embedded import ablation, demo, embedded, embedded_gradual
from ctta.benchmark.recipes.paper import cifar10c, cifar10c_gradual, cifar100c, imagenetc
from ctta.benchmark.recipes.rows import with_settings
from ctta.benchmark.recipes.segmentation import acdc, streets
from ctta.benchmark.recipes.task import Options, Preset, Row, Task
from ctta.streams import Stream, rounds

RECIPES: dict[str, Callable[[Options], Task]] = {
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


def build(name: str, options: Options) -> Task:
    """A recipe's task with all that the user changed."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    task = RECIPES[name](options)
    count = options.rounds or task.rounds

    def stream(order: int | None) -> Stream:
        return rounds(task.stream(order), count) if count > 1 else task.stream(order)

    return replace(task, rows=with_settings(task.rows, options.settings), stream=stream)


__all__ = ["RECIPES", "Options", "Preset", "Row", "Task", "build"]
