"""Make the options of commands out of dataclasses; the options that several commands share, and how they are parsed."""

import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from torch import nn
from typing_extensions import override

from ctta.core.config import load_network, read_config
from ctta.core.options import (
    BATCH_SIZE,
    METHOD,
    MODEL,
    POLICIES,
    SETTINGS,
    Amp,
    Device,
    Mean,
    Option,
    Size,
    Std,
    find_options,
    parse_names,
)
from ctta.data.corruptions.registry import check_severity
from ctta.errors import ConfigError


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function with a parameter per option, for typer, in which dataclasses are replaced by their fields.

    A field that several dataclasses have, such as an inherited one, is one option, described by the first of them, and
    its value goes to all. An option that is not given leaves the default of each dataclass. Other parameters of the
    command are declared with :class:`ctta.core.options.Option`, or typer's own.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: find_options(hint) for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    own: dict[str, Option] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            kind, *metadata = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
            if metadata and isinstance(metadata[0], Option):
                own[name] = metadata[0]
                parameters[name] = _make_parameter(name, kind, metadata[0], parameter.default)
            else:
                parameters[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            continue
        defaults = {
            each.name: each.default if each.default_factory is MISSING else None for each in fields(hints[name])
        }
        for field, (kind, option) in groups[name].items():
            parameters.setdefault(field, _make_parameter(field, kind, option, defaults[field]))

    @functools.wraps(function)
    def run(**typed: Any) -> None:
        arguments = {name: value for name, value in typed.items() if name in hints and value is not None}
        arguments |= {name: _parse(name, option, typed[name]) for name, option in own.items() if name in arguments}
        for name, options in groups.items():
            given = {field: typed[field] for field in options if typed[field] is not None}
            parsed = {field: _parse(field, options[field][1], value) for field, value in given.items()}
            arguments[name] = hints[name](**parsed)
        function(**arguments)

    vars(run)["__signature__"] = inspect.Signature(list(parameters.values()))
    run.__annotations__ = {name: each.annotation for name, each in parameters.items()} | {"return": None}
    return run


def _parse(name: str, option: Option, value: Any) -> Any:
    try:
        return value if option.parse is None else option.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{option.name or format_name(name)}: {error}") from error


def format_name(field: str) -> str:
    """Return how the option of a field is typed.

    >>> format_name("batch_size")
    '--batch-size'
    """
    return f"--{field.replace('_', '-')}"


def list_given(options: Any, *names: str) -> list[str]:
    """Return which of some fields of a dataclass differ from their defaults, as their options are typed."""
    known = find_options(type(options))
    defaults = {each.name: each.default for each in fields(options)}
    given = [name for name in names or known if getattr(options, name) != defaults[name]]
    return [known[name][1].name or format_name(name) for name in given]


def _make_parameter(name: str, kind: Any, option: Option, default: Any) -> inspect.Parameter:
    """Return the parameter that typer makes an option of."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    typed, metavar, text = (
        next(each for each in members if each is not type(None)),
        option.metavar,
        option.documentation,
    )
    if option.repeatable:
        typed, default = list[str], None
    elif option.parse is not None:
        if default is not None and "Default: " not in text:
            text += f" Default: {default if isinstance(default, str) else ', '.join(map(str, default))}."
        typed, default = str, None
    elif any(get_origin(each) is os.PathLike for each in members):
        typed = Path
    elif get_origin(typed) is Literal:
        metavar = metavar or "|".join(get_args(typed))
    names = [option.name] if option.name else [format_name(name)] if default is False else []
    info = typer.Option(
        *names, help=text, metavar=metavar, min=option.min, max=option.max, rich_help_panel=option.panel
    )
    if typed == tuple[int, int]:
        info.callback = check_size
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[typed if default is not None else typed | None, info],
    )


JsonOption = Annotated[bool, Option("Print JSON instead of text.", name="--json")]


def check_size(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Reject sizes that are not positive; typer has ranges for single numbers only."""
    if size is not None and min(size) < 1:
        raise typer.BadParameter(f"height and width must be at least 1, got {size[0]} {size[1]}")
    return size


@dataclass(frozen=True)
class ChosenAdaptation:
    """Network, method and settings of a command, from its options and the file of ``--config``; None if nobody says."""

    model: str
    net: nn.Module  # on its device
    method: str | None
    texts: list[str]  # settings and policies, each NAME=VALUE
    size: tuple[int, int] | None
    batch_size: int | None


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network of a command."""

    model: Annotated[str, MODEL]
    mean: Mean = None
    std: Std = None
    device: Device = "cpu"

    def load(self) -> nn.Module:
        """Load the network and move it to its device."""
        return load_network(self.model, self.device, self.mean, self.std)


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The network and the method of a command, from its options and from the file of ``--config``."""

    model: Annotated[str | None, MODEL.with_default("that of --config")] = None
    config: Annotated[
        Path | None,
        Option(
            "Read network, method, settings and batch size from this file, as 'ctta advise' writes it; other options "
            "replace what it says. Default: none.",
            "FILE.toml",
        ),
    ] = None
    method: Annotated[str | None, METHOD.with_default("that of --config")] = None
    settings: Annotated[Sequence[str], SETTINGS] = ()
    size: Size = None
    mean: Mean = None
    std: Std = None
    device: Device = "cpu"
    amp: Amp = None
    batch_size: Annotated[int | None, BATCH_SIZE.with_default("that of --config, else 32")] = None

    @property
    def texts(self) -> list[str]:
        """The settings, each ``NAME=VALUE``."""
        return [*self.settings, *([] if self.amp is None else [f"amp={self.amp}"])]

    def choose(self) -> ChosenAdaptation:
        """Load the network and decide on a method: by the options where they are given, else by the configuration.

        The settings of a configuration belong to its method, so ``--method`` with another name drops them.
        """
        method, texts = self.method, self.texts
        if self.config is None:
            if self.model is None:
                raise ConfigError("give --model SPEC, or --config FILE with a network in it")
            net = load_network(self.model, self.device, self.mean, self.std)
            return ChosenAdaptation(self.model, net, method, texts, self.size, self.batch_size)
        found = read_config(self.config)
        if (model := self.model or found.model) is None:
            raise ConfigError(f"{self.config} names no network: give --model SPEC, or add model to its table [network]")
        is_given = any(each is not None for each in (self.model, self.mean, self.std))
        mean, std = (self.mean, self.std) if is_given else (found.mean, found.std)
        net = load_network(model, self.device, mean, std)
        is_same = method is None or method == found.method
        return ChosenAdaptation(
            model,
            net,
            method or found.method,
            [*(found.texts if is_same else []), *texts],
            self.size or found.size,
            self.batch_size or found.batch_size,
        )


@dataclass(frozen=True, kw_only=True)
class AdaptationOptions(ConfigOptions):
    """The network and the method of a command, with policies and a seed."""

    method: Annotated[str | None, METHOD.with_default("that of --config or of the saved state, else vane")] = None
    policies: Annotated[Sequence[str], POLICIES] = ()
    seed: Annotated[int | None, Option("Seed the random draws of the method. Default: 0.", "N")] = None

    @property
    @override
    def texts(self) -> list[str]:
        seed = [] if self.seed is None else [f"seed={self.seed}"]
        return [*super().texts, *(f"policies={text}" for text in self.policies), *seed]


def parse_every(text: str) -> dict[str, Any]:
    """Parse which frames of a video to take: every n-th, or one per interval.

    >>> parse_every("10"), parse_every("0.5s")
    ({'every': 10}, {'interval': 0.5})
    """
    try:
        return {"interval": float(text.removesuffix("s"))} if text.endswith("s") else {"every": int(text)}
    except ValueError:
        raise ConfigError(f"expected every n-th frame such as 10, or seconds such as 0.5s, got {text!r}") from None


def parse_severities(text: str) -> list[float]:
    """Parse severities such as ``3,5`` or ``2.25``.

    >>> parse_severities("5,2.25")
    [2.25, 5]
    """
    try:
        levels = [check_severity(float(part)) for part in parse_names(text)]
    except (ValueError, ConfigError):
        levels = []
    if not levels or not all(levels):
        raise ConfigError(f"expected severities above 0 and up to 5, such as 3,5 or 2.25; got {text!r}")
    return sorted(set(levels))
