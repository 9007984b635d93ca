"""``ctta.toml``: a network, a method with its settings, and the stream that they are for.

``ctta advise`` writes the file, ``ctta adapt --config``, ``ctta serve --config`` and :func:`from_config` read it, and
people edit it::

    [network]
    model = "file:net.py:build"
    mean = [0.485, 0.456, 0.406]
    std = [0.229, 0.224, 0.225]
    size = [224, 224]

    [method]
    name = "tent"
    settings = { lr = 0.0003, batch_stats = "blend" }
    policies = ["reset_every=1000"]

    [stream]
    batch_size = 32

Every table but ``[method]`` may be left out. Other tables, such as the evidence that ``ctta advise`` adds, are kept and
not interpreted here.
"""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from ctta.core.model import AdaptiveModel
from ctta.core.options import (
    BATCH_SIZE,
    METHOD,
    MODEL,
    POLICIES,
    SETTINGS,
    Mean,
    Size,
    Std,
    find_options,
)
from ctta.core.registry import resolve_method
from ctta.errors import ConfigError, did_you_mean
from ctta.io.atomic import atomic_write
from ctta.models import load, to_device


@dataclass(frozen=True)
class AdaptationConfig:
    """The content of a ``ctta.toml``; a path in the name of its network is relative to the file.

    Attributes:
        tables: Further tables of the file.
    """

    method: Annotated[str, METHOD]
    settings: Annotated[Mapping[str, Any], SETTINGS] = field(default_factory=dict)
    policies: Annotated[tuple[str, ...], POLICIES] = ()
    model: Annotated[str | None, MODEL] = None
    mean: Mean = None
    std: Std = None
    size: Size = None
    batch_size: Annotated[int | None, BATCH_SIZE] = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The settings and policies as ``NAME=VALUE``, as ``--set`` takes them."""
        policies = [f"policies={text}" for text in self.policies]
        return [*(f"{name}={value}" for name, value in self.settings.items()), *policies]

    def build(self, net: nn.Module) -> AdaptiveModel:
        """Wrap a network in the method.

        Args:
            net: The network, for images in [0, 1]; it is copied and never changed.

        Returns:
            A model that predicts and adapts when it is called.
        """
        named = resolve_method(self.method)
        return named.build(net, **named.parse(self.texts))

    def load_network(self, device: str = "cpu") -> nn.Module:
        """Load the network that the file names, for images in [0, 1].

        Args:
            device: Device to move it to.

        Returns:
            The network.

        Raises:
            ConfigError: The file names none.
        """
        if self.model is None:
            raise ConfigError("the configuration names no network: pass net, or add model to its table [network]")
        return load_network(self.model, device, self.mean, self.std)

    def write(self, path: str | os.PathLike[str], *, comment: Sequence[str] = ()) -> None:
        """Write the file; an interruption leaves the old one or the new one.

        Args:
            path: The file.
            comment: Lines at its start.
        """
        own = {table: {key: getattr(self, name) for key, name in keys.items()} for table, keys in KEYS.items()}
        tables: dict[str, Mapping[str, Any]] = {**own, **self.tables}
        lines = [f"# {line}".rstrip() for line in comment]
        for name, table in tables.items():
            given = {key: value for key, value in table.items() if value is not None and value != () and value != {}}
            if given:
                lines += ["", f"[{name}]", *(f"{key} = {_format(value)}" for key, value in given.items())]
        with atomic_write(path) as temporary:
            temporary.write_text("\n".join(lines).lstrip("\n") + "\n", encoding="utf-8")


def load_network(
    spec: str, device: str, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> nn.Module:
    """Load a network by its name, let it normalize images in [0, 1], and move it to a device."""
    return to_device(load(spec, mean=mean, std=std), device)


def _list_keys() -> dict[str, dict[str, str]]:
    """Return the tables of a file, and in each the field of every key."""
    found: dict[str, dict[str, str]] = {"network": {}, "method": {}, "stream": {}}  # in this order
    for name, (_, option) in find_options(AdaptationConfig).items():
        table, _, key = (option.key or "").partition(".")
        found[table][key] = name
    return found


#: The tables that are interpreted, with the field of each key.
KEYS = _list_keys()


def read_config(path: str | os.PathLike[str]) -> AdaptationConfig:
    """Read a ``ctta.toml``.

    Args:
        path: The file.

    Returns:
        Its content.

    Raises:
        ConfigError: The file does not exist, is not TOML, names no method, or has a key that is not known.
    """
    file = Path(path)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}: 'ctta advise' writes one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{file} is not a TOML file: {error}") from error
    tables = {name: content.pop(name, {}) for name in KEYS}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: expected a table [{name}], got {table!r}")
        for key in table:
            if key not in KEYS[name]:
                known = ", ".join(KEYS[name])
                raise ConfigError(f"{file}: [{name}] has no key {key!r}{did_you_mean(key, KEYS[name])}; it has {known}")
    network, method = tables["network"], tables["method"]
    if not isinstance(method.get("name"), str):
        raise ConfigError(f'{file} names no method: add a name, for example name = "tent", to its table [method]')
    lists = {key: _read_list(file, "network", key, network.get(key)) for key in ("mean", "std", "size")}
    policies = _read_list(file, "method", "policies", method.get("policies", []))
    batch_size = tables["stream"].get("batch_size")
    if batch_size is not None and not (type(batch_size) is int and batch_size >= 1):
        raise ConfigError(f"{file}: [stream] batch_size must be a whole number from 1, got {batch_size!r}")
    if lists["size"] is not None and len(lists["size"]) != 2:
        raise ConfigError(f"{file}: [network] size must be [height, width], got {network['size']}")
    settings = method.get("settings", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: [method] settings must be a table such as {{ lr = 0.001 }}, got {settings!r}")
    return AdaptationConfig(
        method["name"],
        settings,
        policies or (),
        model=_resolve_path(network.get("model"), file),
        **lists,
        batch_size=batch_size,
        tables={name: table for name, table in content.items() if isinstance(table, dict)},
    )


def from_config(path: str | os.PathLike[str], net: nn.Module | None = None, *, device: str = "cpu") -> AdaptiveModel:
    """Build the model that a ``ctta.toml`` describes, such as one written by ``ctta advise``.

    Args:
        path: The file.
        net: The network, for images in [0, 1]; by default the one that the file names.
        device: Device of the network that the file names.

    Returns:
        A model that predicts and adapts when it is called.

    Raises:
        ConfigError: The file is not valid, or names no network and none is given.

    >>> import tempfile
    >>> net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     AdaptationConfig("tent", {"lr": 0.0003}).write(f"{folder}/ctta.toml")
    ...     model = from_config(f"{folder}/ctta.toml", net)
    >>> type(model).__name__, model.optimizer.param_groups[0]["lr"]
    ('Tent', 0.0003)
    """
    config = read_config(path)
    return config.build(config.load_network(device) if net is None else net)


def relative_model(model: str, path: str | os.PathLike[str]) -> str:
    """Return the name of a network for a configuration file: a path below the file's folder becomes relative to it.

    Args:
        model: The name, with a path as the user typed it.
        path: The configuration file.

    Returns:
        The name.
    """
    loader, colon, rest = model.partition(":")
    if not colon or loader != "file":
        return model
    file, _, function = rest.rpartition(":")
    absolute, folder = Path(file).expanduser().absolute(), Path(path).absolute().parent
    short = absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute
    return f"file:{short.as_posix()}:{function}"


def _resolve_path(model: Any, file: Path) -> str | None:
    """Return the name of a network with its path relative to the working directory instead of the file."""
    if model is None:
        return None
    if not isinstance(model, str):
        raise ConfigError(f'{file}: [network] model must be a text such as "file:net.py:build", got {model!r}')
    loader, colon, rest = model.partition(":")
    return f"file:{file.parent / Path(rest).expanduser()}" if colon and loader == "file" else model


def _read_list(file: Path, table: str, key: str, value: Any) -> Any:
    if value is None:
        return None
    expected = str if key == "policies" else int if key == "size" else (int, float)
    if not isinstance(value, list) or not all(isinstance(item, expected) for item in value):
        raise ConfigError(f"{file}: [{table}] {key} must be a list, such as {_EXAMPLES[key]}, got {value!r}")
    return tuple(value)


_EXAMPLES = {"mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]", "size": "[224, 224]", "policies": '["restore=0.01"]'}


def _format(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a basic string of TOML has the same escapes
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_format(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_format, value))}]"
    return str(value)
