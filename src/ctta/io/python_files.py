"""Import a user's Python file as a module and take a name from it."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ctta.errors import CheckpointError, ConfigError, did_you_mean, first_line

#: Modules of user files have this prefix, and the hash of their path: two files called model.py stay apart.
_PREFIX = "ctta_file_"


def split_file_spec(spec: str, kind: str, form: str) -> tuple[Path, str]:
    """Split ``PATH.py:NAME``, the text after ``file:``, into the path of an existing file and the name.

    The error says what ``kind`` of name is looked for, such as ``"function"``, and which ``form`` was expected.

    Raises:
        ConfigError: The text has another form, or there is no such file.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"'file:{spec}' names no {kind} of a Python file; {form}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"file not found: {file}; {form}")
    return file, name


def absolute_file_spec(spec: str) -> str:
    """Return a name such as ``file:net.py:build`` with an absolute path, for other processes; other names as given."""
    loader, colon, rest = spec.partition(":")
    return f"file:{Path(rest).expanduser().absolute()}" if colon and loader == "file" else spec


def import_python_file(file: Path) -> ModuleType:
    """Execute a file as a module and register it, because dataclasses and pickle look their module up.

    Call it within :func:`siblings_importable`, so that the file can import modules from its own folder.
    """
    name = f"{_PREFIX}{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
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


def is_from_python_file(cls: type) -> bool:
    """Return whether a class was defined by a file that :func:`import_python_file` executed."""
    return cls.__module__.startswith(_PREFIX)


def get_from_file(module: ModuleType, name: str, file: Path, kind: str, form: str) -> object:
    """Return an attribute of an imported file; raise a ConfigError like :func:`split_file_spec` if it has none."""
    if not hasattr(module, name):
        defined = [each for each in vars(module) if not each.startswith("_")]
        raise ConfigError(f"{file} has no {kind} {name}{did_you_mean(name, defined)}; {form}")
    found: object = getattr(module, name)
    return found


@contextmanager
def siblings_importable(file: Path) -> Iterator[None]:
    """Put the file's folder on ``sys.path`` for the duration of the block."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def user_file_errors(file: Path) -> Iterator[None]:
    """Report whatever fails in a user's file as a ConfigError that names the file.

    Errors of this library, which the file may use, keep their type: their messages are specific enough.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError | CheckpointError):
            raise
        raise ConfigError(f"{file} failed with {type(error).__name__}: {first_line(error)}") from error
