"""Networks by name, whichever library or file they come from."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from ctta.core.options import resolve_device
from ctta.errors import ConfigError, did_you_mean, first_line
from ctta.models.cifar import ResNeXt29, WideResNet, embedded
from ctta.models.pretrained import load_huggingface, load_python_file, load_timm, load_torchvision, normalize_input
from ctta.models.segmentation import SlidingWindow, streets
from ctta.models.weights import copy_weights_, read_weights


def load(spec: str, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> nn.Module:
    """Return a network by name, in eval mode, for images in [0, 1].

    ==============================  ================================================================================
    ``embedded``                    the ResNet-20 for CIFAR-10 that ships with the library
    ``streets``                     the tiny SegFormer for drawn street scenes that ships with the library
    ``wrn28-10:PATH``               WideResNet-28-10 with weights from a file, such as RobustBench's ``Standard``
    ``resnext29:PATH``              ResNeXt-29 4x32d with weights from a file, such as RobustBench's AugMix
    ``timm:NAME``                   a pretrained timm network, such as ``timm:resnet50.tv_in1k``
    ``torchvision:NAME[:WEIGHTS]``  a pretrained torchvision network, such as ``torchvision:resnet50:IMAGENET1K_V1``
    ``hf:NAME[@REVISION]``          a Hugging Face network for classification or segmentation: repository or folder
    ``file:PATH.py:function``       the return value of a function in a Python file
    ``sliding:NETWORK``             any of these for segmentation, inside a :class:`ctta.models.SlidingWindow`
    ==============================  ================================================================================

    Networks of other libraries are wrapped with their normalization (:class:`ctta.models.Normalized`). The number of
    classes is taken from the weights. ``file:`` executes the file, so use it only with files you trust; weights files
    are read without executing code, and a Hugging Face repository that needs code of its own is refused. To load the
    same network every time, pin the commit: ``hf:microsoft/resnet-50@COMMIT``.

    Args:
        spec: Name of the network, in one of the forms of the table.
        mean: Mean of each channel that images are normalized by, for a network that does not do so itself: one of a
            file, or a Hugging Face network without ``preprocessor_config.json``.
        std: Standard deviation of each channel.

    Returns:
        The network, in eval mode on the CPU.

    Raises:
        ConfigError: If no network has this name, or mean and std are given for one that normalizes images itself.
        CheckpointError: If a weights file is damaged or belongs to another architecture.
        ImportError: If the library that provides the network is not installed.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "mine.py")
    ...     _ = file.write_text("import torch; build = lambda: torch.nn.Conv2d(3, 5, 1)")
    ...     net = load(f"file:{file}:build")
    >>> net(torch.rand(1, 3, 8, 8)).shape
    torch.Size([1, 5, 8, 8])
    """
    form, argument = choose_form(spec, LOADERS)
    if form.startswith("hf:") and mean is not None:  # for a network that does not say how images are normalized
        net = load_huggingface(argument, needs_processor=False)
    else:
        net = LOADERS[form](argument)
    return normalize_input(net.eval(), spec, mean, std).eval()


def choose_form(spec: str, known: Iterable[str]) -> tuple[str, str]:
    """Return which form a name of a network has, and its argument: what follows the first colon.

    Args:
        spec: The name, such as ``"timm:resnet50"``.
        known: The forms, such as ``"timm:NAME"``.

    Raises:
        ConfigError: It has none of the forms.
    """
    if not isinstance(spec, str):
        raise TypeError(f"expected the name of a network, such as 'timm:resnet50', got {type(spec).__name__}")
    prefix, _, argument = spec.partition(":")
    forms = {form.partition(":")[0]: form for form in known}
    if prefix not in forms:
        *first, last = (f"'{form}'" for form in forms.values())
        file = f" (did you mean 'file:{spec if ':' in spec else f'{spec}:build'}'?)" if prefix.endswith(".py") else ""
        raise ConfigError(
            f"unknown network '{spec}'{file or did_you_mean(prefix, forms)}; expected {', '.join(first)} or {last}"
        )
    if bool(argument) != (":" in forms[prefix]):
        raise ConfigError(f"malformed network name '{spec}'; expected '{forms[prefix]}'")
    return forms[prefix], argument


def class_names(spec: str) -> tuple[str, ...] | None:
    """Return the names of a network's classes, in the order of its outputs, or None where they are not known.

    Args:
        spec: Name of the network, as :func:`load` takes it.

    Returns:
        The names.

    >>> class_names("embedded")[:2]
    ('airplane', 'automobile')
    """
    return CIFAR10_CLASSES if spec in CIFAR10_NETWORKS else None


def list_models() -> list[str]:
    """Return the forms of names that :func:`load` accepts, such as ``"embedded"`` and ``"timm:NAME"``."""
    return list(LOADERS)


def to_device(net: nn.Module, device: str) -> nn.Module:
    """Move a network to a device.

    Args:
        net: Network to move; changed in place, as by ``net.to``.
        device: Device such as ``"cpu"`` or ``"cuda:0"``; ``"auto"`` for an accelerator if there is one. Without a
            number, each process that ``torchrun`` starts on a machine takes another accelerator.

    Returns:
        The same network.

    Raises:
        ConfigError: If the device does not exist or cannot be used.
    """
    try:
        chosen, local_rank = torch.device(resolve_device(device)), os.environ.get("LOCAL_RANK")
        if chosen.type != "cpu" and chosen.index is None and local_rank is not None:
            num_devices = max(1, torch.get_device_module(chosen).device_count())  # with none, torch says so below
            chosen = torch.device(chosen.type, int(local_rank) % num_devices)
        return net.to(chosen)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device that is not there
        raise ConfigError(
            f"cannot use device {device!r}: {first_line(error)}; expected a device such as cpu or cuda:0"
        ) from error


def _load_cifar_network(architecture: type[WideResNet | ResNeXt29], head: str, path: str) -> nn.Module:
    weights = read_weights(path)
    net = architecture(num_classes=len(weights[head])) if head in weights else architecture()
    copy_weights_(net, weights, origin=path)
    return net


#: The classes of CIFAR-10, in the order of its labels.
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

#: The networks for its images that ship with the library.
CIFAR10_NETWORKS = ("embedded",)

#: Form of a name to its loader. The prefix before the first colon selects the loader, the rest is its argument.
LOADERS: dict[str, Callable[[str], nn.Module]] = {
    "embedded": lambda _: embedded(),
    "streets": lambda _: streets(),
    "wrn28-10:PATH": partial(_load_cifar_network, WideResNet, "fc.weight"),
    "resnext29:PATH": partial(_load_cifar_network, ResNeXt29, "classifier.weight"),
    "timm:NAME": load_timm,
    "torchvision:NAME": load_torchvision,
    "hf:NAME": load_huggingface,
    "file:PATH.py:function": load_python_file,
    "sliding:NETWORK": lambda spec: SlidingWindow(load(spec)),
}
