"""Pretrained networks of timm, torchvision and Hugging Face, wrapped to take images in [0, 1]."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ctta.models.normalized import Normalized


def from_timm(name: str) -> nn.Module:
    """A pretrained network of timm, normalised as its ``pretrained_cfg`` says."""
    timm = _library("timm")
    try:
        net = timm.create_model(name, pretrained=True)
    except RuntimeError as error:  # what timm raises for unknown names, tags and networks without weights
        raise ValueError(
            f"timm cannot give '{name}' with weights: {_first_line(error)}. "
            "timm.list_models('*part*', pretrained=True) shows what there is"
        ) from error
    return _normalized(net, net.pretrained_cfg.get("mean"), net.pretrained_cfg.get("std"), f"timm:{name}")


def from_torchvision(rest: str) -> nn.Module:
    """A pretrained network of torchvision, normalised as its weights' transforms say.

    Args:
        rest: ``NAME`` for torchvision's default weights, or ``NAME:WEIGHTS`` such as ``resnet50:IMAGENET1K_V1``.
    """
    name, _, tag = rest.partition(":")
    models = _library("torchvision.models")
    try:
        known = models.get_model_weights(name)
    except ValueError as error:
        raise ValueError(
            f"torchvision has no network '{name}': torchvision.models.list_models() shows what there is"
        ) from error
    try:
        weights = known[tag or "DEFAULT"]
    except KeyError as error:
        there_are = ", ".join(known.__members__) or "none"
        raise ValueError(f"torchvision has no weights '{tag or 'DEFAULT'}' of {name}; there are {there_are}") from error
    preparation = weights.transforms()
    mean, std = (getattr(preparation, key, None) for key in ("mean", "std"))
    return _normalized(models.get_model(name, weights=weights), mean, std, f"torchvision:{rest}")


def from_hugging_face(name: str) -> nn.Module:
    """A network for classification or semantic segmentation from Hugging Face, normalised as its processor does.

    Args:
        name: of a repository, such as ``microsoft/resnet-50``, or the path of a folder.
    """
    transformers = _library("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        # The settings of the image processor, not the processor: that would need Pillow and torchvision.
        file = _attribute(transformers, "utils").cached_file(name, "preprocessor_config.json")
        is_dense = any("ForSemanticSegmentation" in kind for kind in config.architectures or ())
        task = "AutoModelForSemanticSegmentation" if is_dense else "AutoModelForImageClassification"
        net: nn.Module = _attribute(transformers, task).from_pretrained(name)
    except (OSError, ValueError) as error:  # no such name or no connection; a network for another task
        raise ValueError(
            f"Hugging Face cannot give '{name}' for classification or segmentation: {_first_line(error)}. Check the "
            "spelling and the connection, or give the path of a folder that holds the network"
        ) from error
    settings = json.loads(Path(file).read_text(encoding="utf-8"))
    _check_preparation(settings, f"hf:{name}")
    if not settings.get("do_normalize", True):
        return net
    return _normalized(net, settings.get("image_mean"), settings.get("image_std"), f"hf:{name}")


def _check_preparation(settings: dict[str, Any], spec: str) -> None:
    """Refuse image processors that do more to values in [0, 1] than to subtract a mean and divide by a std."""
    unusual = [key for key in ("rescale_offset", "include_top", "do_flip_channel_order") if settings.get(key)]
    if not settings.get("do_rescale", True):
        unusual.append("do_rescale")
    if not math.isclose(settings.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3):
        unusual.append("rescale_factor")
    if unusual:
        raise ValueError(
            f"{spec} prepares its images in a way that mean and std do not describe ({', '.join(unusual)}): "
            "prepare them in a function of your own, and give 'file:PATH.py:function'"
        )


def _normalized(net: nn.Module, mean: Any, std: Any, spec: str) -> nn.Module:
    if mean is None or std is None:
        raise ValueError(
            f"{spec} does not say with which mean and std its images were normalised: wrap it in "
            "ctta.models.Normalized in a function of your own, and give 'file:PATH.py:function'"
        )
    return Normalized(net, tuple(mean), tuple(std))


def _library(name: str) -> Any:
    """A library that ctta does not depend on, or one sentence on how to get it."""
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)  # first, to tell its absence from that of something it needs
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise ImportError(
                f"this network needs {package}, which is not installed: pip install {package}", name=package
            ) from error
        raise _broken(package, error) from error
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise _broken(package, error) from error


def _attribute(library: Any, name: str) -> Any:
    """Transformers imports its parts on first use, so its broken imports show up here."""
    try:
        return getattr(library, name)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise _broken(library.__name__, error) from error


def _broken(package: str, error: Exception) -> ImportError:
    # Nearly always a torchvision that was built for another torch; timm and transformers import it too.
    packages = " ".join(dict.fromkeys(("torch", "torchvision", package)))
    return ImportError(
        f"this network needs {package}, which is installed but cannot be imported ({_first_line(error)}): install "
        f"versions made for each other (torch is {torch.__version__}), with pip install --upgrade {packages}",
        name=package,
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
