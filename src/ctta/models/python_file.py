"""A network built by a function in a user's Python file."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from ctta.errors import CheckpointError, ConfigError
from ctta.models.pretrained import first_line

_FORM = "expected 'file:PATH.py:function', such as 'file:my_model.py:build'"


def load_python_file(path_and_name: str) -> nn.Module:
    """Call a function of a Python file without arguments and return the network it builds; a class works too.

    The file is executed as a module and can import modules from its own folder. The network must take images in
    [0, 1]: wrap it in :class:`ctta.models.Normalized` if it was trained on normalized ones.

    Args:
        path_and_name: Path and name, ``PATH.py:function``.
    """
    path, _, name = path_and_name.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"'file:{path_and_name}' names no function of a Python file; {_FORM}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"file not found: {file}; {_FORM}")
    with _siblings_importable(file):
        try:
            net = _get_function(_import_file(file), name, file)()
        except (ConfigError, CheckpointError):
            raise  # of this library, which the file may use; these messages are specific enough
        except Exception as error:  # whatever else fails in a user's file
            raise ConfigError(f"{file} failed with {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{name} in {file} returned {type(net).__name__}; expected a torch.nn.Module")
    return net


def _get_function(module: ModuleType, name: str, file: Path) -> Callable[[], Any]:
    """Return a callable of the module that can be called without arguments."""
    if not hasattr(module, name):
        raise ConfigError(f"{file} has no function {name}; {_FORM}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{name} in {file} is of type {type(function).__name__}, not a function; {_FORM}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"{name} in {file} must be callable without arguments: {error}") from error
    return cast(Callable[[], Any], function)


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module and register it, because dataclasses and pickle look their module up."""
    # The hash of the path keeps two files called model.py apart.
    name = f"ctta_file_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _siblings_importable(file: Path) -> Iterator[None]:
    """Put the file's folder on ``sys.path`` for the duration of the block."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
