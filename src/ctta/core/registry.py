"""Methods by name, the same names in Python and in every command.

=======================  =====================================================================================
``tent``                 a method of the library, a key of :data:`ctta.METHODS`
``cotta_fast``           a preset of one: ``NAME_PRESET``, from the class attribute ``presets``
``mine``                 a method of an installed package, from its entry point in the group ``ctta.methods``
``file:mine.py:Mine``    a class of a Python file
=======================  =====================================================================================

A package provides methods with a few lines in its ``pyproject.toml``::

    [project.entry-points."ctta.methods"]
    mine = "my_package.methods:Mine"
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from torch import nn

from ctta.core.hyperparameters import parse_hyperparameters
from ctta.core.model import AdaptiveModel, MethodInfo
from ctta.errors import ConfigError, did_you_mean, first_line
from ctta.io.python_files import (
    absolute_file_spec,
    get_from_file,
    import_python_file,
    siblings_importable,
    split_file_spec,
    user_file_errors,
)
from ctta.methods import METHODS
from ctta.nn.activations import MemoryReduction
from ctta.policies import parse_policy

__all__ = [
    "DEFAULT_METHOD",
    "ENTRY_POINTS",
    "NamedMethod",
    "adapt",
    "find_methods",
    "list_methods",
    "name_of",
    "parse_settings",
    "resolve_method",
    "unknown_method",
]

#: The method of :func:`adapt` unless the user names one.
DEFAULT_METHOD = "vane"
#: The group of entry points that installed packages provide methods in.
ENTRY_POINTS = "ctta.methods"
_FORM = "expected 'file:PATH.py:Class', such as 'file:mine.py:MyMethod'"
#: Classes of files by path, time of the last change, size and name: the same class until the file changes.
_file_classes: dict[tuple[Path, int, int, str], type[AdaptiveModel]] = {}


@dataclass(frozen=True)
class NamedMethod:
    """What a name stands for: a class, and the hyperparameters of a preset.

    Attributes:
        name: The name as a user types it; that of a file has an absolute path.
        method: The class.
        preset: Name of the preset within the class; empty for the class's own defaults.
        settings: Hyperparameters of the preset.
    """

    name: str
    method: type[AdaptiveModel]
    preset: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def info(self) -> MethodInfo:
        """Facts about the method; those that an author does not declare are taken from its base class."""
        declared = self.method.info or MethodInfo(self.method.__name__)
        is_own = "info" in vars(self.method)
        return declared if is_own else replace(declared, title=self.method.__name__, paper="")

    @property
    def label(self) -> str:
        """The name for the row of a table, such as ``"CoTTA fast"``."""
        return f"{self.info.title} {self.preset.replace('_', ' ')}".strip()

    def parse(self, texts: Iterable[str]) -> dict[str, Any]:
        """Return hyperparameters from texts such as ``lr=1e-4``, see :func:`parse_settings`.

        Args:
            texts: Each ``NAME=VALUE``.

        Returns:
            Keyword arguments for :meth:`build`.
        """
        return parse_settings(self.method, texts, self.settings)

    def build(self, net: nn.Module, **hyperparameters: Any) -> AdaptiveModel:
        """Wrap a network in the method.

        Args:
            net: The network; it is copied and never changed.
            **hyperparameters: Keyword arguments that differ from the preset and the defaults.

        Returns:
            A model that predicts and adapts when it is called.
        """
        if self.preset and callable(preset := getattr(self.method, self.preset, None)):
            model: AdaptiveModel = preset(net, **hyperparameters)  # it may look at the network
            return model
        return self.method(net, **{**self.settings, **hyperparameters})


def adapt(
    net: nn.Module,
    method: str = DEFAULT_METHOD,
    *,
    compile: bool = False,
    reduce_memory: MemoryReduction | None = None,
    **hyperparameters: Any,
) -> AdaptiveModel:
    """Wrap a network in a method by name.

    Args:
        net: The network; it is copied and never changed.
        method: A method such as ``"tent"``, a preset such as ``"cotta_fast"``, a class of a file such as
            ``"file:mine.py:MyMethod"``, or a method of an installed package. :func:`list_methods` lists
            the names.
        compile: Whether to compile the networks, see :meth:`ctta.AdaptiveModel.compile`.
        reduce_memory: ``"checkpoint"`` or ``"frozen"`` to keep fewer activations for the backward pass, see
            :meth:`ctta.AdaptiveModel.reduce_memory`; None to keep what torch keeps.
        **hyperparameters: Keyword arguments of the method.

    Returns:
        A model that predicts and adapts when it is called.

    Raises:
        ConfigError: There is no such method.

    >>> net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    >>> model = adapt(net, "tent", lr=1e-4)
    """
    model = resolve_method(method).build(net, **hyperparameters)
    if reduce_memory is not None:
        model.reduce_memory(reduce_memory)
    return model.compile() if compile else model


def resolve_method(name: str) -> NamedMethod:
    """Return what a name stands for.

    Args:
        name: A name in one of the forms of this module. ``file:`` executes the file, and a method of another
            package imports that package.

    Returns:
        The class and the hyperparameters.

    Raises:
        ConfigError: There is no such method, or its file or package cannot be imported.

    >>> resolve_method("cotta_paper").settings["gate"]
    'element'
    """
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a method, such as 'tent', got {type(name).__name__}")
    if name.startswith("file:"):
        return NamedMethod(absolute_file_spec(name), _load_file_class(name.removeprefix("file:")))
    if (built_in := _built_in().get(name)) is not None:
        return built_in
    packages = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in packages:
        return NamedMethod(name, _load_entry_point(packages[name]))
    raise unknown_method(name, [*_built_in(), *packages])


def unknown_method(name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a name that no method has; it suggests what may have been meant.

    Args:
        name: The name.
        known: The names that are expected.

    Returns:
        The error, to be raised.
    """
    suggestion = f" (did you mean 'file:{name}'?)" if ".py:" in name else did_you_mean(name, known)
    return ConfigError(
        f"there is no method {name!r}{suggestion}; expected one of {', '.join(known)}, or file:PATH.py:Class"
    )


def parse_settings(
    method: type[AdaptiveModel], texts: Iterable[str], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return keyword arguments of a method from texts, see :func:`ctta.core.hyperparameters.parse_hyperparameters`.

    ``policies=reset_every=1000`` adds a policy, see :func:`ctta.policies.parse_policy`.

    Args:
        method: The class that the arguments are for.
        texts: Each ``NAME=VALUE``.
        given: Arguments that replace the method's defaults.

    Returns:
        The arguments named in the texts.

    Raises:
        ConfigError: A text cannot be parsed, or the method has no such argument.

    >>> parse_settings(METHODS["tent"], ["policies=reset_every=1000"])
    {'policies': (reset_every(num=1000, unit='batches'),)}
    """
    typed = [(text, text.partition("=")) for text in texts]
    policies = [parse_policy(value.strip()) for _, (name, _, value) in typed if name.strip() == "policies"]
    others = [text for text, (name, _, _) in typed if name.strip() != "policies"]
    arguments = parse_hyperparameters(method, others, given)
    if policies:
        if "policies" not in inspect.signature(method).parameters:
            raise ConfigError(f"{method.__name__} takes no policies, got {policies[0].name}: use a method that learns")
        arguments["policies"] = (*(given or {}).get("policies", ()), *policies)
    return arguments


def list_methods() -> list[str]:
    """Return the names of all methods and presets: those of the library first, then those of installed packages."""
    packages = [point.name for point in entry_points(group=ENTRY_POINTS)]
    return list(dict.fromkeys([*_built_in(), *packages]))


def find_methods(class_name: str) -> list[str]:
    """Return the names of the library's methods and presets of a class; nothing is imported for it.

    Args:
        class_name: Name of the class, such as ``"CoTTA"``.

    Returns:
        The names; empty if the class is not one of the library.

    >>> find_methods("Tent"), find_methods("CoTTA")[:2]
    (['tent'], ['cotta', 'cotta_official'])
    """
    return [name for name, named in _built_in().items() if named.method.__name__ == class_name]


def name_of(method: type[AdaptiveModel]) -> str:
    """Return the name of a class: its key in ``ctta.METHODS``, or the name of the class for any other.

    Args:
        method: The class.

    Returns:
        The name, for people to read.
    """
    return next((name for name, cls in METHODS.items() if cls is method), method.__name__)


def _built_in() -> dict[str, NamedMethod]:
    """Return the methods of the library and their presets, each after its method."""
    found = {}
    for name, cls in METHODS.items():
        found[name] = NamedMethod(name, cls)
        for preset, settings in cls.presets.items():
            found[f"{name}_{preset}"] = NamedMethod(f"{name}_{preset}", cls, preset, settings)
    return found


def _load_file_class(spec: str) -> type[AdaptiveModel]:
    file, name = split_file_spec(spec, "class", _FORM)
    status = file.stat()
    key = file.resolve(), status.st_mtime_ns, status.st_size, name
    if key not in _file_classes:
        with siblings_importable(file), user_file_errors(file):
            found = get_from_file(import_python_file(file), name, file, "class", _FORM)
        _file_classes[key] = _check_class(found, f"{name} in {file}")
    return _file_classes[key]


def _load_entry_point(point: EntryPoint) -> type[AdaptiveModel]:
    package = point.dist.name if point.dist else point.value.partition(":")[0]
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # whatever fails while another package is imported
        raise ConfigError(
            f"the method {point.name!r} of the package {package} cannot be imported "
            f"({type(error).__name__}: {first_line(error)}): update or remove the package"
        ) from error
    return _check_class(found, f"{point.name!r} of the package {package}")


def _check_class(found: object, what: str) -> type[AdaptiveModel]:
    if isinstance(found, type) and issubclass(found, AdaptiveModel):
        return found
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
    raise ConfigError(f"{what} is {kind}; expected a class that extends ctta.AdaptiveModel")
