"""Pretrained networks of timm and torchvision, and the import of libraries that ctta does not depend on."""

import importlib
from typing import Any

import torch
from torch import nn

from ctta.errors import ConfigError, first_line
from ctta.models.normalized import Normalized

#: Requirement to install for a package, where it is not the package's own name.
REQUIREMENTS = {"transformers": "'ctta[segmentation]'"}


def load_timm(name: str) -> nn.Module:
    """Return a pretrained timm network, normalized according to its ``pretrained_cfg``."""
    timm = import_library("timm")
    try:
        net = timm.create_model(name, pretrained=True)
    except RuntimeError as error:  # timm's error for unknown names, unknown tags and networks without weights
        raise ConfigError(
            f"timm has no pretrained network '{name}': {first_line(error)}. "
            "timm.list_models('*part*', pretrained=True) lists what is available"
        ) from error
    return wrap_normalized(net, net.pretrained_cfg.get("mean"), net.pretrained_cfg.get("std"), f"timm:{name}")


def load_torchvision(name_and_weights: str) -> nn.Module:
    """Return a pretrained torchvision network, normalized according to the transforms of its weights.

    Args:
        name_and_weights: ``NAME`` for torchvision's default weights, or ``NAME:WEIGHTS`` such as
            ``resnet50:IMAGENET1K_V1``.
    """
    name, _, tag = name_and_weights.partition(":")
    models = import_library("torchvision.models")
    try:
        available = models.get_model_weights(name)
    except ValueError as error:
        raise ConfigError(
            f"torchvision has no network '{name}': torchvision.models.list_models() lists what is available"
        ) from error
    try:
        weights = available[tag or "DEFAULT"]
    except KeyError as error:
        tags = ", ".join(available.__members__) or "none"
        raise ConfigError(f"torchvision has no weights '{tag or 'DEFAULT'}' for {name}; available: {tags}") from error
    transforms = weights.transforms()
    mean, std = (getattr(transforms, key, None) for key in ("mean", "std"))
    return wrap_normalized(models.get_model(name, weights=weights), mean, std, f"torchvision:{name_and_weights}")


def wrap_normalized(
    net: nn.Module, mean: Any, std: Any, spec: str, wrapper: type[Normalized] = Normalized
) -> nn.Module:
    """Wrap a network with the mean and std its library reports; raise if it reports none."""
    if mean is None or std is None:
        raise ConfigError(
            f"{spec} does not report the mean and std of its input normalization: wrap the network in "
            "ctta.models.Normalized in a function of your own, and use 'file:PATH.py:function'"
        )
    return wrapper(net, tuple(mean), tuple(std))


def import_library(name: str) -> Any:
    """Import a library that ctta does not depend on; the ImportError says how to install it."""
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)  # first, to distinguish a missing package from one of its missing dependencies
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == package:
            requirement = REQUIREMENTS.get(package, package)
            raise ImportError(
                f"this network needs {package}, which is not installed: pip install {requirement}"
            ) from error
        raise _broken_library(package, error) from error
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise _broken_library(package, error) from error


def get_attribute(library: Any, name: str) -> Any:
    """Return an attribute of a library; transformers imports lazily, so broken dependencies show up only here."""
    try:
        return getattr(library, name)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise _broken_library(library.__name__, error) from error


def _broken_library(package: str, error: Exception) -> ImportError:
    # The usual cause is a torchvision built for another torch; timm and transformers import it too.
    packages = " ".join(dict.fromkeys(("torch", "torchvision", package)))
    return ImportError(
        f"this network needs {package}, which is installed but cannot be imported ({first_line(error)}): install "
        f"compatible versions (torch is {torch.__version__}) with pip install --upgrade {packages}"
    )
