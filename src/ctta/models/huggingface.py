"""Networks of Hugging Face transformers for classification and semantic segmentation."""

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ctta.errors import ConfigError, InputError, first_line
from ctta.models.normalized import IMAGENET_MEAN, IMAGENET_STD, Normalized
from ctta.models.pretrained import get_attribute, import_library, wrap_normalized

#: Suffix of an architecture that returns class logits, and the class of transformers that loads it.
AUTO_CLASSES = {
    "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
    "ForImageClassification": "AutoModelForImageClassification",
}


class TransformersModel(Normalized):
    """A transformers network that normalizes its input and can be pickled after it was called.

    At its first call, a transformers network registers local functions as hooks on its layers to collect their
    outputs. Pickle refuses local functions. They are left out here and registered again at the next call.

    Args:
        net: Network of transformers that takes normalized images.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """

    @override
    def forward(self, x: Tensor) -> Any:
        try:
            return super().forward(x)
        except RuntimeError as error:
            if "Kernel size can't be greater than actual input size" not in str(error):
                raise
            raise InputError(
                f"images of {x.shape[2]}x{x.shape[3]} pixels are too small for {type(self.net).__name__}: use larger "
                "images, or views that shrink them less, such as views=ctta.views.multiscale_flip((1, 1.5, 2))"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_modules": {"net": _without_local_hooks(self.net, {})}}


def load_huggingface(name: str) -> nn.Module:
    """Return a Hugging Face network, normalized according to its image processor.

    Code that a repository brings along is never executed.

    Args:
        name: Repository such as ``microsoft/resnet-50``, or the path of a local folder. ``REPOSITORY@REVISION`` selects
            a branch, a tag or a commit.
    """
    transformers = import_library("transformers")
    repository, revision = _split_revision(name)
    # Without an explicit False, transformers asks on the terminal whether to run the code of a repository.
    options = {"revision": revision, "trust_remote_code": False}
    with _translate_hub_errors(name):
        config = transformers.AutoConfig.from_pretrained(repository, **options)
    auto_class = get_attribute(transformers, _select_auto_class(config, name))
    with _translate_hub_errors(name):
        processor = _read_processor_config(transformers, config, repository, revision)
        net: nn.Module = auto_class.from_pretrained(repository, **options).float()  # some files hold 16-bit weights
    _check_processor(processor, f"hf:{name}")
    if not processor.get("do_normalize", True):
        return net
    return wrap_normalized(
        net, processor.get("image_mean"), processor.get("image_std"), f"hf:{name}", TransformersModel
    )


def _split_revision(name: str) -> tuple[str, str]:
    """Split ``REPOSITORY@REVISION``; the revision is ``main`` by default. Folders may have an @ in their path."""
    repository, separator, revision = name.rpartition("@")
    if not separator or Path(name).is_dir():
        return name, "main"
    if not repository or not revision:
        raise ConfigError(f"malformed network name 'hf:{name}'; expected 'hf:NAME' or 'hf:NAME@REVISION'")
    if Path(repository).is_dir():
        raise ConfigError(f"hf:{name} asks for a revision of a local folder, which has none: leave out @{revision}")
    return repository, revision


@contextmanager
def _translate_hub_errors(name: str) -> Iterator[None]:
    """Turn an error of the hub into a ConfigError that names the network."""
    try:
        yield
    except (OSError, ValueError) as error:  # unknown name, no connection, or a network for another task
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"hf:{name} needs code from its own repository, which ctta does not run: if you trust it, load it in a "
                "function of your own, and use 'file:PATH.py:function'"
            ) from error
        raise ConfigError(
            f"Hugging Face has no network '{name}' for classification or segmentation: {first_line(error)}. Check the "
            "spelling and the connection, or use the path of a folder that holds the network"
        ) from error


def _select_auto_class(config: Any, name: str) -> str:
    """Return the loader for the task the network was trained for; another one would add a randomly initialized head."""
    architectures = config.architectures or ["ForImageClassification"]  # some image networks leave it out
    for suffix, auto_class in AUTO_CLASSES.items():
        if any(suffix in architecture for architecture in architectures):
            return auto_class
    raise ConfigError(
        f"hf:{name} is a {' or '.join(architectures)}, which does not return class logits: expected a network "
        f"...{' or ...'.join(AUTO_CLASSES)}"
    )


def _read_processor_config(transformers: Any, config: Any, repository: str, revision: str) -> dict[str, Any]:
    """Read the settings of the image processor; constructing the processor would need Pillow and torchvision."""
    try:
        cached_file = get_attribute(transformers, "utils").cached_file
        file = cached_file(repository, "preprocessor_config.json", revision=revision)
    except OSError:
        if not (Path(repository).is_dir() and config.model_type == "segformer"):
            raise
        # Saved without its processor; the default of SegFormer's processor is the mean and std of ImageNet.
        return {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    settings: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return settings


def _check_processor(settings: dict[str, Any], spec: str) -> None:
    """Raise for image processors that do more to values in [0, 1] than subtract a mean and divide by a std."""
    unsupported = [key for key in ("rescale_offset", "include_top", "do_flip_channel_order") if settings.get(key)]
    if not settings.get("do_rescale", True):
        unsupported.append("do_rescale")
    if not math.isclose(settings.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3):
        unsupported.append("rescale_factor")
    if unsupported:
        raise ConfigError(
            f"{spec} preprocesses its images in a way that a mean and std cannot express ({', '.join(unsupported)}): "
            "preprocess them in a function of your own, and use 'file:PATH.py:function'"
        )


def _without_local_hooks(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    """Return the same layers around the same tensors, without transformers' hooks and the flag that they are there."""
    if id(module) not in done:
        twin = done[id(module)] = copy.copy(module)
        vars(twin).pop("_output_capturing_hooks_installed", None)
        hooks = module._forward_hooks
        twin._forward_hooks = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_local_hook(hook))
        twin._modules = {
            name: None if child is None else _without_local_hooks(child, done)
            for name, child in module._modules.items()
        }
    return done[id(module)]


def _is_local_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("transformers.") and "<locals>" in hook.__qualname__
