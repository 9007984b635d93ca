"""Networks by name, whichever library or file they come from."""

from collections.abc import Callable

from torch import nn

from ctta.models.checkpoints import copy_weights_, read_weights
from ctta.models.embedded import embedded
from ctta.models.from_file import from_file
from ctta.models.hubs import from_hugging_face, from_timm, from_torchvision
from ctta.models.resnext import ResNeXt29
from ctta.models.sliding_window import SlidingWindow
from ctta.models.street_segformer import streets
from ctta.models.wide_resnet import WideResNet


def load(spec: str) -> nn.Module:
    """A network by name, in eval mode, that takes images in [0, 1].

    ==============================  ================================================================================
    ``embedded``                    the small network that comes with the library, for CIFAR-10
    ``streets``                     the one for the embedded street: a tiny SegFormer; see :func:`ctta.models.streets`
    ``wrn28-10:PATH``               WideResNet-28-10 with the weights of a file, such as RobustBench's `Standard`
    ``resnext29:PATH``              ResNeXt-29 4x32d with the weights of a file, such as RobustBench's AugMix
    ``timm:NAME``                   a pretrained network of timm, such as ``timm:resnet50.tv_in1k``
    ``torchvision:NAME[:WEIGHTS]``  one of torchvision, such as ``torchvision:resnet50:IMAGENET1K_V1``
    ``hf:NAME``                     one of Hugging Face for images or segmentation, or the path of its folder
    ``file:PATH.py:function``       what a function of your own returns
    ``sliding:NETWORK``             any of these for segmentation, seen through a :class:`ctta.models.SlidingWindow`
    ==============================  ================================================================================

    Networks of other libraries come with their normalisation inside (:class:`ctta.models.Normalized`). The number of
    classes is the file's. The file of ``file:`` is run, so it must be one you trust; files of weights need not be.

    Args:
        spec: as in the table.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "mine.py")
    ...     _ = file.write_text("import torch; build = lambda: torch.nn.Conv2d(3, 5, 1)")
    ...     net = load(f"file:{file}:build")
    >>> net(torch.rand(1, 3, 8, 8)).shape
    torch.Size([1, 5, 8, 8])
    """
    if not isinstance(spec, str):
        raise TypeError(f"expected the name of a network, such as 'timm:resnet50', got a {type(spec).__name__}")
    kind, _, rest = spec.partition(":")
    forms = {form.partition(":")[0]: form for form in LOADERS}
    if kind not in forms:
        raise ValueError(f"'{spec}' names no network that ctta.models.load knows; expected {_listed()}")
    if bool(rest) != (":" in forms[kind]):
        raise ValueError(f"'{spec}' does not say which network; expected '{forms[kind]}'")
    return LOADERS[forms[kind]](rest).eval()


def _wrn28_10(path: str) -> nn.Module:
    weights = read_weights(path)
    net = WideResNet(28, 10, len(weights["fc.weight"]) if "fc.weight" in weights else 10)
    copy_weights_(net, weights, origin=path)
    return net


def _resnext29(path: str) -> nn.Module:
    weights = read_weights(path)
    net = ResNeXt29(len(weights["classifier.weight"]) if "classifier.weight" in weights else 100)
    copy_weights_(net, weights, origin=path)
    return net


#: The form of a name, up to its first colon the prefix that chooses the loader, which gets what follows that colon.
LOADERS: dict[str, Callable[[str], nn.Module]] = {
    "embedded": lambda _nothing: embedded(),
    "streets": lambda _nothing: streets(),
    "wrn28-10:PATH": _wrn28_10,
    "resnext29:PATH": _resnext29,
    "timm:NAME": from_timm,
    "torchvision:NAME": from_torchvision,
    "hf:NAME": from_hugging_face,
    "file:PATH.py:function": from_file,
    "sliding:NETWORK": lambda spec: SlidingWindow(load(spec)),
}


def _listed() -> str:
    *first, last = (f"'{form}'" for form in LOADERS)
    return f"{', '.join(first)} or {last}"
