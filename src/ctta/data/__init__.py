"""What can be adapted to, and in which order: corruptions, datasets, drawn streets and streams."""

import importlib
from types import ModuleType

_SUBMODULES = ("corruptions", "datasets", "streams", "streets")


def __getattr__(name: str) -> ModuleType:
    """Import a part when it is first used, as ``ctta`` does."""
    if name not in _SUBMODULES:
        raise AttributeError(f"module 'ctta.data' has no attribute {name!r}")
    return importlib.import_module(f"ctta.data.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
