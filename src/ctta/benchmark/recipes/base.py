"""The parts of a recipe: what a user may change, the methods it compares, and the task that ties them together."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from ctta.base import AdaptiveModel
from ctta.errors import ConfigError
from ctta.hyperparameters import parse_hyperparameters
from ctta.streams import Stream
from ctta.views import DrawnViews

Preset = Literal["official", "paper"]


@dataclass(frozen=True)
class BenchmarkOptions:
    """What a user may change about a recipe; None keeps the recipe's own value.

    The fields are written to ``run.json``: a run folder is only continued with the same options.

    Attributes:
        data: Folder of the dataset; by default the copy in the cache of :mod:`ctta.datasets`.
        model: Source network, as :func:`ctta.models.load` takes it.
        preset: CoTTA as in its reference implementation ("official") or as in the text of the paper.
        limit: Maximum number of images per segment.
        batch_size: Images per batch.
        rounds: How many times the stream is repeated.
        settings: Hyperparameters of single methods, such as ``"cotta.restore=0.005"``.
        device: Device of the network, such as ``"cuda:0"``.
    """

    data: str | None = None
    model: str | None = None
    preset: Preset = "official"
    limit: int | None = None
    batch_size: int | None = None
    rounds: int | None = None
    settings: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def changes(self) -> list[str]:
        """The options that make results differ from the recipe's own, as typed on the command line."""
        typed = [("--model", self.model), ("--preset", self.preset if self.preset != "official" else None)]
        return [f"{name} {value}" for name, value in typed if value] + [f"--set {text}" for text in self.settings]


@dataclass(frozen=True)
class MethodSpec:
    """A method with the hyperparameters of a recipe: one row of its table.

    Attributes:
        label: Name of the row in tables.
        factory: Method class, or one of its named variants such as ``CoTTA.paper``.
        settings: Keyword arguments of the factory.
        reset_at_domain: Whether the model is reset where a new segment begins.
    """

    label: str
    factory: Callable[..., AdaptiveModel]
    settings: Mapping[str, Any] = field(default_factory=dict)
    reset_at_domain: bool = False

    @property
    def method_class(self) -> type[AdaptiveModel]:
        """The class of the method, also where the factory is a named variant of it."""
        cls = getattr(self.factory, "__self__", self.factory)
        assert isinstance(cls, type) and issubclass(cls, AdaptiveModel)
        return cls

    @property
    def is_random(self) -> bool:
        """Whether the method draws views or restored weights, so that results depend on the seed."""
        parameters = inspect.signature(self.method_class).parameters
        settings = {name: parameter.default for name, parameter in parameters.items()} | dict(self.settings)
        return isinstance(settings.get("views"), DrawnViews) or settings.get("restore", 0) > 0

    def build_model(self, net: nn.Module, seed: int) -> AdaptiveModel:
        """Wrap a network in the method.

        Args:
            net: Source network.
            seed: Seed of the method; ignored by methods without randomness.

        Returns:
            A new adaptive model.
        """
        return self.factory(net, **self.settings, **({"seed": seed} if self.is_random else {}))


@dataclass(frozen=True)
class BenchmarkTask:
    """A table to fill: a network, a stream and the methods to compare.

    Attributes:
        make_network: Builds the source network, in eval mode.
        make_stream: Builds the stream for the number of an order, None for the standard order.
        methods: Methods by the names that ``methods=`` and ``--methods`` take.
        default_methods: Names of the methods that run unless the user chooses.
        default_orders: Orders that run unless the user chooses.
        default_seeds: Seeds that run unless the user chooses, for methods that draw random numbers.
        rounds: How many times the stream is repeated unless the user chooses.
        downloads: Names in :mod:`ctta.datasets` that the task reads unless the user provides data and model.
    """

    make_network: Callable[[], nn.Module]
    make_stream: Callable[[int | None], Stream]
    methods: Mapping[str, MethodSpec]
    default_methods: tuple[str, ...]
    default_orders: tuple[int | None, ...] = (None,)
    default_seeds: tuple[int, ...] = (0,)
    rounds: int = 1
    downloads: tuple[str, ...] = ()


def apply_settings(methods: Mapping[str, MethodSpec], settings: tuple[str, ...]) -> dict[str, MethodSpec]:
    """Return the methods with some hyperparameters replaced.

    Args:
        methods: Methods of a recipe by name.
        settings: Texts such as ``cotta.restore=0.005``; values are parsed as in :mod:`ctta.hyperparameters`.

    Returns:
        The methods by name, in the same order.

    Raises:
        ConfigError: A text is malformed, or names a method that the recipe does not have.
    """
    changed = dict(methods)
    for setting in settings:
        target, equals, text = setting.partition("=")
        name, dot, key = target.partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"expected a setting METHOD.NAME=VALUE, such as cotta.restore=0.005; got {setting!r}")
        if name not in changed:
            raise ConfigError(f"{setting!r} names a method that this recipe does not have; it has {', '.join(changed)}")
        if key == "seed":
            raise ConfigError(f"{setting!r} sets a seed: choose seeds with the option 'seeds' instead")
        spec = changed[name]
        parsed = parse_hyperparameters(spec.method_class, [f"{key}={text}"], spec.settings)
        changed[name] = replace(spec, settings={**spec.settings, **parsed})
    return changed
