"""A network built by a function in a user's Python file."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn

from ctta.errors import ConfigError
from ctta.io.python_files import (
    get_from_file,
    import_python_file,
    siblings_importable,
    split_file_spec,
    user_file_errors,
)

_FORM = "expected 'file:PATH.py:function', such as 'file:my_model.py:build'"


def load_python_file(path_and_name: str) -> nn.Module:
    """Call a function of a Python file without arguments and return the network it builds; a class works too.

    The file is executed as a module and can import modules from its own folder. The network gets images in [0, 1]:
    wrap it in :class:`ctta.models.Normalized` if it was trained on normalized ones.

    Args:
        path_and_name: Path and name, ``PATH.py:function``.
    """
    file, name = split_file_spec(path_and_name, "function", _FORM)
    with siblings_importable(file), user_file_errors(file):
        function = get_from_file(import_python_file(file), name, file, "function", _FORM)
        net = _check_callable(function, name, file)()
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{name} in {file} returned {type(net).__name__}; expected a torch.nn.Module")
    return net


def _check_callable(function: object, name: str, file: Path) -> Callable[[], Any]:
    """Return the function if it can be called without arguments."""
    if not callable(function):
        raise ConfigError(f"{name} in {file} is of type {type(function).__name__}, not a function; {_FORM}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"{name} in {file} must be callable without arguments: {error}") from error
    return cast(Callable[[], Any], function)
