"""Pretrained networks of timm, torchvision and Hugging Face, wrapped to take images in [0, 1]."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ctta.models.from_transformers import FromTransformers
from ctta.models.normalized import IMAGENET_MEAN, IMAGENET_STD, Normalized
from ctta.models.other_libraries import first_line, library, part_of

#: How the class of a network ends whose answers are logits, and transformers' loader of these.
TASKS = {
    "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
    "ForImageClassification": "AutoModelForImageClassification",
}


def from_timm(name: str) -> nn.Module:
    """A pretrained network of timm, normalised as its ``pretrained_cfg`` says."""
    timm = library("timm")
    try:
        net = timm.create_model(name, pretrained=True)
    except RuntimeError as error:  # what timm raises for unknown names, tags and networks without weights
        raise ValueError(
            f"timm cannot give '{name}' with weights: {first_line(error)}. "
            "timm.list_models('*part*', pretrained=True) shows what there is"
        ) from error
    return _normalized(net, net.pretrained_cfg.get("mean"), net.pretrained_cfg.get("std"), f"timm:{name}")


def from_torchvision(rest: str) -> nn.Module:
    """A pretrained network of torchvision, normalised as its weights' transforms say.

    Args:
        rest: ``NAME`` for torchvision's default weights, or ``NAME:WEIGHTS`` such as ``resnet50:IMAGENET1K_V1``.
    """
    name, _, tag = rest.partition(":")
    models = library("torchvision.models")
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
    transformers = library("transformers")
    with _explaining(name):
        config = transformers.AutoConfig.from_pretrained(name)
    loader = part_of(transformers, _task_of(config, name))
    with _explaining(name):
        settings = _preparation_of(transformers, config, name)
        net: nn.Module = loader.from_pretrained(name).float()  # or it would have the 16 bits of some files
    _check_preparation(settings, f"hf:{name}")
    if not settings.get("do_normalize", True):
        return net
    mean, std = settings.get("image_mean"), settings.get("image_std")
    return _normalized(net, mean, std, f"hf:{name}", FromTransformers)


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # no such name or no connection; a network for another task
        raise ValueError(
            f"Hugging Face cannot give '{name}' for classification or segmentation: {first_line(error)}. Check the "
            "spelling and the connection, or give the path of a folder that holds the network"
        ) from error


def _task_of(config: Any, name: str) -> str:
    """The loader for what the network was trained to do: another one would add a head of random weights."""
    classes = config.architectures or ["ForImageClassification"]  # which some networks for images do not say
    for ending, loader in TASKS.items():
        if any(ending in architecture for architecture in classes):
            return loader
    raise ValueError(
        f"hf:{name} is a {' or '.join(classes)}, and its answers are not the logits of classes: expected a network "
        f"...{' or ...'.join(TASKS)}"
    )


def _preparation_of(transformers: Any, config: Any, name: str) -> dict[str, Any]:
    """The settings of the image processor, not the processor: that would need Pillow and torchvision."""
    try:
        file = part_of(transformers, "utils").cached_file(name, "preprocessor_config.json")
    except OSError:
        if not (Path(name).is_dir() and config.model_type == "segformer"):
            raise
        # A network saved without its processor; SegFormer's has ImageNet's mean and std unless told otherwise.
        return {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    settings: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return settings


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


def _normalized(net: nn.Module, mean: Any, std: Any, spec: str, wrapper: type[Normalized] = Normalized) -> nn.Module:
    if mean is None or std is None:
        raise ValueError(
            f"{spec} does not say with which mean and std its images were normalised: wrap it in "
            "ctta.models.Normalized in a function of your own, and give 'file:PATH.py:function'"
        )
    return wrapper(net, tuple(mean), tuple(std))
