"""What a recipe is made of: a network, a stream, and the rows of a table."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ctta.base import AdaptiveModel
from ctta.streams import Stream
from ctta.views import DrawnViews

Preset = Literal["official", "paper"]


@dataclass(frozen=True)
class Options:
    """What a user may change about a recipe; None leaves it as the recipe has it."""

    data: str | None = None  # the folder of the data set; by default what ctta.datasets has in its cache
    model: str | None = None  # see ctta.models.load
    preset: Preset = "official"
    limit: int | None = None  # images per segment
    batch_size: int | None = None
    rounds: int | None = None  # how often the stream is gone through
    settings: tuple[str, ...] = ()  # such as "cotta.restore=0.005"
    device: str = "cpu"

    @property
    def changes(self) -> list[str]:
        """What makes the results other than the recipe's own, as typed."""
        typed = [("--model", self.model), ("--preset", self.preset if self.preset != "official" else None)]
        return [f"{name} {value}" for name, value in typed if value] + [f"--set {text}" for text in self.settings]


@dataclass(frozen=True)
class Row:
    """One row of a table: a method as it is set in this task.

    Args:
        label: as the table prints it.
        build: a method or one of its named variants, called with a network and the settings.
        settings: keyword arguments of it.
        reset_at_domain: whether the method is told where a segment begins.
    """

    label: str
    build: Callable[..., AdaptiveModel]
    settings: Mapping[str, Any] = field(default_factory=dict)
    reset_at_domain: bool = False

    @property
    def method(self) -> type[AdaptiveModel]:
        """The class, also behind a named variant."""
        build = getattr(self.build, "__self__", self.build)
        assert isinstance(build, type) and issubclass(build, AdaptiveModel)
        return build

    @property
    def is_random(self) -> bool:
        """Whether views or restored weights are drawn, so that more than one seed makes sense."""
        parameters = inspect.signature(self.method).parameters
        settings = {name: parameter.default for name, parameter in parameters.items()} | dict(self.settings)
        return isinstance(settings.get("views"), DrawnViews) or settings.get("restore", 0) > 0

    def model(self, net: nn.Module, seed: int) -> AdaptiveModel:
        """The method around a network."""
        return self.build(net, **self.settings, **({"seed": seed} if self.is_random else {}))


@dataclass(frozen=True)
class Task:
    """A table to fill.

    Args:
        network: makes the source network, in eval mode.
        stream: the stream in the order of a number, None for the standard one.
        rows: by the names that ``--methods`` takes.
        methods: the rows that are run if the user does not say.
        orders: likewise.
        seeds: likewise, for rows that draw random numbers.
        rounds: how often the stream is gone through if the user does not say.
        downloads: the names in ``ctta.datasets`` that it reads unless the user gives data and model of their own.
    """

    network: Callable[[], nn.Module]
    stream: Callable[[int | None], Stream]
    rows: Mapping[str, Row]
    methods: tuple[str, ...]
    orders: tuple[int | None, ...] = (None,)
    seeds: tuple[int, ...] = (0,)
    rounds: int = 1
    downloads: tuple[str, ...] = ()
