"""A network that a user's own Python file builds."""

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

_FORM = "expected 'file:PATH.py:function', such as 'file:my_model.py:build'"


def from_file(rest: str) -> nn.Module:
    """What a function of a file returns, called without arguments; a class of networks will do as well.

    The file runs as any module does, and can import what lies beside it. The network must take images in [0, 1]:
    wrap it in :class:`ctta.models.Normalized` if it was trained on normalised ones.

    Args:
        rest: the path and the name, ``PATH.py:function``.
    """
    path, _, name = rest.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"'file:{rest}' does not say which function of which file; {_FORM}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {file}; {_FORM}")
    with _siblings_importable(file):
        try:
            net = _function_in(_imported(file), name, file)()
        except (ValueError, OSError, ImportError):
            raise  # these say what is wrong
        except Exception as error:  # whatever else goes wrong in a user's file is the user's to mend
            raise ValueError(f"{file} failed with {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"{name} of {file} returned {type(net).__name__}; it must return a torch.nn.Module")
    return net


def _function_in(module: ModuleType, name: str, file: Path) -> Callable[[], Any]:
    if not hasattr(module, name):
        raise ValueError(f"there is no {name} in {file}; {_FORM}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{name} of {file} is of type {type(function).__name__}, not a function; {_FORM}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{name} of {file} is called without arguments, and needs some: {error}") from error
    return cast(Callable[[], Any], function)


def _imported(file: Path) -> ModuleType:
    """The file as a module; registered, because dataclasses and pickle look their module up."""
    # Named by its path, so that two files called model.py do not take each other's place.
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
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
