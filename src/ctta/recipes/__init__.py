"""The paper's tasks and the embedded ones, by name; each is a function of a few lines."""

from collections.abc import Callable

from ctta.recipes.acdc import acdc
from ctta.recipes.embedded import ablation, demo, embedded, embedded_gradual
from ctta.recipes.paper import cifar10c, cifar10c_gradual, cifar100c, imagenetc
from ctta.recipes.task import Options, Preset, Row, Task

RECIPES: dict[str, Callable[[Options], Task]] = {
    "demo": demo,
    "embedded": embedded,
    "embedded-gradual": embedded_gradual,
    "ablation": ablation,
    "cifar10c": cifar10c,
    "cifar10c-gradual": cifar10c_gradual,
    "cifar100c": cifar100c,
    "imagenetc": imagenetc,
    "acdc": acdc,
}

__all__ = ["RECIPES", "Options", "Preset", "Row", "Task"]
