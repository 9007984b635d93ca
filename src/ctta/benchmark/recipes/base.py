"""The parts of a recipe: the methods that it compares, and the task that ties them together."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ctta.core.model import AdaptiveModel
from ctta.core.registry import list_methods, name_of, parse_settings, resolve_method, unknown_method
from ctta.data.streams import Stream
from ctta.errors import ConfigError, did_you_mean
from ctta.policies import parse_policy
from ctta.source_stats import SourceStats
from ctta.views import DrawnViews


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
        """Whether the method draws random numbers, such as views or restored weights: results depend on the seed."""
        parameters = inspect.signature(self.method_class).parameters
        settings = {name: parameter.default for name, parameter in parameters.items()} | dict(self.settings)
        if "seed" not in parameters:
            return False
        if not {"views", "restore"} & parameters.keys() or any(each.is_random for each in settings.get("policies", ())):
            return True
        starts_random = self.method_class.info is not None and self.method_class.info.starts_random
        views = settings.get("views")
        draws_views = isinstance(views, DrawnViews) and getattr(views, "is_random", True)
        return starts_random or draws_views or settings.get("restore", 0) > 0

    @property
    def needs_source_stats(self) -> bool:
        """Whether the method takes statistics of source images, given or not."""
        info = self.method_class.info
        takes_them = "source_stats" in inspect.signature(self.method_class).parameters
        return takes_them and info is not None and info.needs_source_data

    @property
    def lacks_source_stats(self) -> bool:
        """Whether the method needs statistics of source images and has none."""
        return self.needs_source_stats and self.settings.get("source_stats") is None

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
        downloads: Names in :mod:`ctta.data.datasets` that the task reads unless the user provides data and model.
        accepts: The options that only some recipes take and this one does, such as ``"corruptions"``.
        check_network: Raises if a network does not fit the images; called before any cell runs.
        load_stats: Returns the statistics of source images that ship with the network, for the method of a name.
    """

    make_network: Callable[[], nn.Module]
    make_stream: Callable[[int | None], Stream]
    methods: Mapping[str, MethodSpec]
    default_methods: tuple[str, ...]
    default_orders: tuple[int | None, ...] = (None,)
    default_seeds: tuple[int, ...] = (0,)
    rounds: int = 1
    downloads: tuple[str, ...] = ()
    accepts: frozenset[str] = frozenset()
    check_network: Callable[[nn.Module], None] | None = None
    load_stats: Callable[[str], SourceStats] | None = None


def add_methods(methods: Mapping[str, MethodSpec], names: Iterable[str]) -> dict[str, MethodSpec]:
    """Return the methods of a recipe together with others of :mod:`ctta.core.registry`.

    A preset of a method that the recipe has keeps the recipe's settings, except those of the preset.

    Args:
        methods: Methods of a recipe by name.
        names: Names of methods; those of the recipe need no addition.

    Returns:
        The methods by name, those of the recipe first.

    Raises:
        ConfigError: There is no such method, neither in the recipe nor in the registry.
    """
    found = dict(methods)
    for name in names:
        if name in found:
            continue
        if name not in list_methods() and not name.startswith("file:"):
            known = [*methods, *(each for each in list_methods() if each not in methods)]
            raise unknown_method(name, known)
        named = resolve_method(name)
        row = methods.get(name_of(named.method))
        inherited = row.settings if row is not None and row.method_class is named.method else {}
        found[name] = MethodSpec(named.label, named.method, {**inherited, **named.settings})
    return found


def add_source_stats(
    methods: Mapping[str, MethodSpec], load_stats: Callable[[str], SourceStats] | None
) -> dict[str, MethodSpec]:
    """Return the methods with statistics of source images where they need them.

    Args:
        methods: Methods by name.
        load_stats: Returns the statistics for the method of a name; None if there are none.

    Returns:
        The methods by name, in the same order.
    """
    if load_stats is None:
        return dict(methods)
    return {
        name: replace(spec, settings={**spec.settings, "source_stats": load_stats(name)})
        if spec.lacks_source_stats
        else spec
        for name, spec in methods.items()
    }


def apply_settings(
    methods: Mapping[str, MethodSpec], settings: tuple[str, ...], *, ignore_others: bool = False
) -> dict[str, MethodSpec]:
    """Return the methods with some hyperparameters replaced.

    Args:
        methods: Methods of a recipe by name; one of a file is also known by the name of its class.
        settings: Texts such as ``cotta.restore=0.005``; values are parsed as in :mod:`ctta.core.hyperparameters`.
        ignore_others: Whether to ignore settings of other methods, which :func:`plan` has checked.

    Returns:
        The methods by name, in the same order.

    Raises:
        ConfigError: A text is malformed, or names a method that the recipe does not have.
    """
    changed, names = dict(methods), _typed_names(methods)
    for setting in settings:
        target, equals, text = setting.partition("=")
        typed, dot, key = target.partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"expected a setting METHOD.NAME=VALUE, such as cotta.restore=0.005; got {setting!r}")
        if typed not in names:
            if ignore_others:
                continue
            raise _unknown_method(setting, typed, names)
        name = names[typed]
        if key == "seed":
            raise ConfigError(f"{setting!r} sets a seed: choose seeds with the option 'seeds' instead")
        spec = changed[name]
        parsed = parse_settings(spec.method_class, [f"{key}={text}"], spec.settings)
        changed[name] = replace(spec, settings={**spec.settings, **parsed})
    return changed


def apply_policies(
    methods: Mapping[str, MethodSpec], policies: tuple[str, ...], *, ignore_others: bool = False
) -> dict[str, MethodSpec]:
    """Return the methods with policies added.

    Args:
        methods: Methods of a recipe by name; one of a file is also known by the name of its class.
        policies: Texts such as ``reset_every=1000``, for every method that learns, or ``tent.reset_every=1000``, for
            one; see :func:`ctta.policies.parse_policy`.
        ignore_others: Whether to ignore policies of other methods, which :func:`plan` has checked.

    Returns:
        The methods by name, in the same order.

    Raises:
        ConfigError: There is no such policy, or it is for a method that the recipe does not have or that learns
            nothing.
    """
    changed, names = dict(methods), _typed_names(methods)
    for text in policies:
        head = text.partition("=")[0].partition(",")[0]
        typed, dot, _ = head.partition(".")
        if dot and typed not in names:
            if ignore_others:
                continue
            raise _unknown_method(text, typed, names)
        policy = text.removeprefix(f"{typed}.") if dot else text
        parse_policy(policy)  # also where no method learns
        for name, spec in changed.items():
            learns = "policies" in inspect.signature(spec.method_class).parameters
            if name == names[typed] if dot else learns:
                added = parse_settings(spec.method_class, [f"policies={policy}"], spec.settings)
                changed[name] = replace(spec, settings={**spec.settings, **added})
    return changed


def _typed_names(methods: Mapping[str, MethodSpec]) -> dict[str, str]:
    """Return the names of methods by how a user types them: those of files by the name of the class."""
    return {name.rpartition(":")[2] if name.startswith("file:") else name: name for name in methods}


def _unknown_method(text: str, typed: str, names: Mapping[str, str]) -> ConfigError:
    return ConfigError(
        f"{text!r} names a method that this recipe does not have{did_you_mean(typed, names)}; it has {', '.join(names)}"
    )
