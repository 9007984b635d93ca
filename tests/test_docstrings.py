"""Every public name has a documented signature."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest

import ctta
from ctta.core.options import describe_fields


def public_modules() -> list[str]:
    """Return the names of ``ctta`` and of every package below it that declares ``__all__``."""
    names = ["ctta"]
    for module in pkgutil.walk_packages(ctta.__path__, "ctta."):
        if module.name != "ctta.__main__" and hasattr(importlib.import_module(module.name), "__all__"):
            names.append(module.name)
    return names


def documented(docstring: str, section: str) -> set[str]:
    """Return the names that a Google-style section of a docstring describes."""
    found = re.search(rf"^{section}:\n((?:(?: +.*)?\n)*)", docstring + "\n", re.MULTILINE)
    return set(re.findall(r"^    \*{0,2}(\w+)(?: \([^)]*\))?:", found[1], re.MULTILINE)) if found else set()


def undocumented_parts(thing: Any, docstring: str, *, skip_self: bool) -> Iterator[str]:
    """Yield the parameters, and the return value, that a docstring does not describe."""
    signature = inspect.signature(thing)
    parameters = list(signature.parameters)[1 if skip_self else 0 :]
    args = documented(docstring, "Args") | documented(docstring, "Attributes")
    yield from (name for name in parameters if name not in args)
    returns_nothing = signature.return_annotation in (None, "None", inspect.Signature.empty)
    has_section = re.search(r"^(Returns|Yields):$", docstring, re.MULTILINE)
    if inspect.isfunction(thing) and parameters and not returns_nothing and not has_section:
        yield "Returns"


def is_code(thing: Any) -> bool:
    return inspect.isfunction(thing) or inspect.isclass(thing)


def problems_with(name: str, thing: Any) -> Iterator[str]:
    docstring = inspect.getdoc(thing) or ""
    if not docstring:
        yield f"{name} has no docstring"
    elif inspect.isfunction(thing):
        yield from (f"{name}: {part}" for part in undocumented_parts(thing, docstring, skip_self=False))
    elif inspect.isclass(thing) and not issubclass(thing, Enum | BaseException):
        described = documented(docstring, "Args") | documented(docstring, "Attributes")
        if is_dataclass(thing):
            described |= set(describe_fields(thing))  # of options, which say it beside the field
            yield from (
                f"{name}: {field.name}" for field in fields(thing) if field.init and field.name not in described
            )
        elif "__init__" in vars(thing) and not getattr(thing, "_is_protocol", False):
            # Options are one argument here, and their fields are described where they are declared.
            constructor = inspect.unwrap(thing.__init__)
            parameters = [each for each in inspect.signature(constructor).parameters if each != "self"]
            yield from (f"{name}: {each}" for each in parameters if each not in described)
        for method_name, method in vars(thing).items():
            function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            if method_name.startswith("_") or not inspect.isfunction(function):
                continue
            method_doc = inspect.getdoc(getattr(thing, method_name)) or ""
            if not method_doc:
                yield f"{name}.{method_name} has no docstring"
            elif method_name in vars(thing) and not any(hasattr(base, method_name) for base in thing.__mro__[1:]):
                parts = undocumented_parts(function, method_doc, skip_self=not isinstance(method, staticmethod))
                yield from (f"{name}.{method_name}: {part}" for part in parts)


@pytest.mark.parametrize("module_name", public_modules())
def test_every_public_name_has_a_documented_signature(module_name: str) -> None:
    module = importlib.import_module(module_name)
    things = [(name, getattr(module, name)) for name in module.__all__]
    problems = [text for name, thing in things if is_code(thing) for text in problems_with(name, thing)]
    assert not problems, "\n".join(problems)
