"""Pretrained networks of timm, torchvision, Hugging Face or a user's Python file, with their input normalization."""

import copy
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.errors import ConfigError, InputError, first_line
from ctta.io.python_files import (
    get_from_file,
    import_python_file,
    siblings_importable,
    split_file_spec,
    user_file_errors,
)
from ctta.nn.surgery import find_weight

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalize_input(net: nn.Module, spec: str, mean: Sequence[float] | None, std: Sequence[float] | None) -> nn.Module:
    """Return a network for images in [0, 1] from one that expects normalized ones.

    Args:
        net: The network.
        spec: Its name, as :func:`ctta.models.load` takes it.
        mean: Mean of each channel, or one number for all three; None to return the network as it is.
        std: Standard deviation of each channel, in the same way.

    Returns:
        The network inside :class:`Normalized`.

    Raises:
        ConfigError: Only one of mean and std is given, or the network normalizes its input already.
    """
    if mean is None and std is None:
        return net
    if mean is None or std is None:
        raise ConfigError(f"give mean and std together, got mean {mean} and std {std}")
    if isinstance(net, Normalized) or not spec.startswith(("file:", "sliding:file:", "hf:")):
        raise ConfigError(f"the network {spec!r} normalizes its input itself: leave out mean and std")
    channels = (tuple(values) * (3 if len(values) == 1 else 1) for values in (mean, std))
    return (TransformersModel if spec.startswith("hf:") else Normalized)(net, *channels)


class Normalized(nn.Module):
    """A network that normalizes its input: ``net((x - mean) / std)``.

    Corruptions and augmented views work on images in [0, 1], so normalization belongs inside the network. Mean and
    std are buffers: they are where the network is, and networks that differ only in them have different fingerprints.

    Args:
        net: Network that takes normalized images; its output is returned unchanged.
        mean: Mean of each channel.
        std: Standard deviation of each channel; positive.

    >>> net = Normalized(nn.Identity(), mean=[0.5], std=[0.25])
    >>> net(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean or min(std) <= 0:
            raise ConfigError(
                f"expected one mean and one positive std per channel, got mean {tuple(mean)} and std {tuple(std)}"
            )
        self.net = net
        device = find_weight(net).device
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32, device=device).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32, device=device).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Any:
        """Return the network's output for images (N, C, H, W) in [0, 1]."""
        if x.ndim != 4 or x.shape[1] != len(self.mean):  # broadcasting would turn a gray image into several channels
            raise InputError(f"expected images (N, {len(self.mean)}, height, width), got shape {tuple(x.shape)}")
        return self.net((x - self.mean) / self.std)


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

    ``NAME`` has torchvision's default weights, ``NAME:WEIGHTS`` others, such as ``resnet50:IMAGENET1K_V1``.
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


#: Suffix of an architecture that returns class logits, and the class of transformers that loads it.
AUTO_CLASSES = {
    "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
    "ForImageClassification": "AutoModelForImageClassification",
}


class TransformersModel(Normalized):
    """A transformers network that normalizes its input and can be pickled after it was called.

    At its first call, a transformers network registers local functions as hooks on its layers to collect their
    outputs. Pickle refuses local functions. They are left out here and registered again at the next call.
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


#: The files of a Hugging Face network that say what it is, and how its images are normalized.
CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"


def load_huggingface(name: str, *, needs_processor: bool = True, auto_class: str | None = None) -> nn.Module:
    """Return a Hugging Face network (a repository or a local folder), normalized according to its image processor.

    Code that a repository brings along is never executed. ``REPOSITORY@REVISION`` selects a branch, a tag or a commit.
    Without ``needs_processor``, a network that has none is returned for normalized images; so is one that is loaded by
    an ``auto_class``, such as ``"AutoModelForObjectDetection"``.
    """
    transformers = import_library("transformers")
    repository, revision = _split_revision(name)
    folder = Path(repository)
    if not folder.is_dir() and (folder.is_absolute() or repository.startswith(".")):
        raise ConfigError(f"there is no folder {repository}, which hf:{name} stands for: check the path")
    if folder.is_dir() and not (folder / CONFIG).exists():
        raise ConfigError(f"the folder {repository} has no {CONFIG}: save the network with net.save_pretrained(folder)")
    # Without an explicit False, transformers asks on the terminal whether to run the code of a repository.
    options = {"revision": revision, "trust_remote_code": False}
    with _translate_hub_errors(name):
        config = transformers.AutoConfig.from_pretrained(repository, **options)
    loader = get_attribute(transformers, auto_class or _select_auto_class(config, name))
    with _translate_hub_errors(name):
        net: nn.Module = loader.from_pretrained(repository, **options).float()  # some files hold 16-bit weights
    if auto_class is not None:
        return net
    processor = _read_processor_config(transformers, config, repository, revision)
    if processor is None:
        if not needs_processor:
            return net
        raise ConfigError(
            f"hf:{name} has no {PREPROCESSOR}, which says how images are normalized: add the file of the network that "
            "it comes from, or give --mean R,G,B --std R,G,B (mean=, std=)"
        )
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


def _read_processor_config(transformers: Any, config: Any, repository: str, revision: str) -> dict[str, Any] | None:
    """Read the settings of the image processor, None if there are none; building it would need torchvision."""
    try:
        cached_file = get_attribute(transformers, "utils").cached_file
        file = cached_file(repository, PREPROCESSOR, revision=revision)
    except OSError:
        if not (Path(repository).is_dir() and config.model_type == "segformer"):
            return None
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


_FORM = "expected 'file:PATH.py:function', such as 'file:my_model.py:build'"


def load_python_file(path_and_name: str) -> nn.Module:
    """Call a function of a Python file (``PATH.py:function``) without arguments and return the network it builds.

    A class works too. The file is executed as a module and can import modules from its own folder. The network gets
    images in [0, 1]: wrap it in :class:`ctta.models.Normalized` if it was trained on normalized ones.
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
