"""Libraries that ctta does not depend on, imported where they are used."""

import importlib
from typing import Any

import torch

#: What to install for a package; by its own name if it is not here.
EXTRAS = {"transformers": "'ctta[segmentation]'"}


def library(name: str) -> Any:
    """A library that ctta does not depend on, or one sentence on how to get it."""
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)  # first, to tell its absence from that of something it needs
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == package:
            wanted = EXTRAS.get(package, package)
            raise ImportError(
                f"this network needs {package}, which is not installed: pip install {wanted}", name=package
            ) from error
        raise _broken(package, error) from error
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise _broken(package, error) from error


def part_of(imported: Any, name: str) -> Any:
    """A class or module of a library: transformers imports its parts on first use, so broken imports show up here."""
    try:
        return getattr(imported, name)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise _broken(imported.__name__, error) from error


def _broken(package: str, error: Exception) -> ImportError:
    # Nearly always a torchvision that was built for another torch; timm and transformers import it too.
    packages = " ".join(dict.fromkeys(("torch", "torchvision", package)))
    return ImportError(
        f"this network needs {package}, which is installed but cannot be imported ({first_line(error)}): install "
        f"versions made for each other (torch is {torch.__version__}), with pip install --upgrade {packages}",
        name=package,
    )


def first_line(error: Exception) -> str:
    """What an error says, in a line that can go on."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
