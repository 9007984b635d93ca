"""The classifier of a network, and the features that it gets.

A method that needs them calls ``self.use_head(head)`` before it copies the source. Every copy then records the input of
its classifier, so that one pass gives features and logits:

>>> import ctta
>>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
>>> find_head(net)
'2'
>>> record_features_(net, "2")
>>> features, logits = features_and_logits(net, torch.randn(5, 4))
>>> features.shape, torch.equal(get_head(net)(features), logits)
(torch.Size([5, 8]), True)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ctta.core.parallel import change_call, current_call
from ctta.errors import ConfigError
from ctta.nn.norm import NetworkHook

#: Names that torchvision, transformers and others give their classifiers, also as the end of a name (``decode_head``).
_NAMES = ("fc", "classifier", "head", "heads")


@dataclass(frozen=True)
class RecordFeatures(NetworkHook):
    """A forward pre-hook of the classifier that gives its input to :func:`features_and_logits`."""

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Record the input if somebody asked for it."""
        if (recorded := current_call().features) is not None:
            recorded.append(inputs[0])


def find_head(net: nn.Module, head: str | None = None) -> str:
    """Return the name of the layer that computes the logits: a linear layer, or a 1x1 convolution for pixels.

    Looked for are timm's ``get_classifier``, the usual names (``fc``, ``classifier``, ``head``, ``heads``), and at last
    a linear layer or 1x1 convolution after which no other layer has weights.

    Args:
        net: Any network.
        head: The name, if it cannot be found, as in ``net.named_modules()``. If it names a block, the last such layer
            within it is meant.

    Returns:
        The name for ``net.get_submodule``.

    Raises:
        ConfigError: There is no such layer, or more than one fits.
    """
    modules = dict(net.named_modules())
    if head is not None:
        if head not in modules:
            raise ConfigError(f"the network has no layer {head!r} to be the head; it has {_some_names(modules)}")
        found = _last_layer(modules[head], any_size=True)
        if found is None:
            raise ConfigError(f"the head {head!r} has no linear layer or convolution: name the layer of the logits")
        return _join(head, found)
    candidates = list(_from_get_classifier(net)) or _from_names(modules)
    if len(candidates) > 1:
        names = " or ".join(f"head={name!r}" for name in candidates)
        raise ConfigError(f"several layers of the network may be its head: give {names}")
    return candidates[0] if candidates else _from_order(modules)


def _from_get_classifier(net: nn.Module) -> Iterator[str]:
    """Yield the names of what timm's ``get_classifier`` returns; distilled networks return two."""
    for prefix, module in net.named_modules():
        if callable(get_classifier := getattr(module, "get_classifier", None)):
            returned = get_classifier()
            found = list(returned) if isinstance(returned, tuple | list) else [returned]
            names = {id(part): name for name, part in module.named_modules()}
            for part in found:
                layer = _last_layer(part, any_size=True) if id(part) in names else None
                if layer is None:
                    raise ConfigError("the network has no classifier (get_classifier() gives none): name it, head=...")
                yield _join(prefix, _join(names[id(part)], layer))
            return


def _from_names(modules: dict[str, nn.Module]) -> list[str]:
    """Return the layers at the usual names, of those that are nearest to the root."""
    found: dict[str, int] = {}
    for name, module in modules.items():
        last = name.rpartition(".")[2]
        is_usual = any(last == usual or last.endswith(f"_{usual}") for usual in _NAMES)
        if is_usual and not last.startswith("aux") and (layer := _last_layer(module)) is not None:
            found.setdefault(_join(name, layer), name.count("."))
    return [name for name, depth in found.items() if depth == min(found.values())]


def _from_order(modules: dict[str, nn.Module]) -> str:
    """Return the last layer with weights, which must be one that can compute logits."""
    with_weights = [
        name for name, module in modules.items() if list(module.parameters(recurse=False)) or is_linear(module)
    ]
    if not with_weights or not _is_head(modules[with_weights[-1]]):
        last = f"its last layer with weights is a {type(modules[with_weights[-1]]).__name__}" if with_weights else ""
        raise ConfigError(
            f"the network's head was not found ({last or 'it has no weights'}): name the layer that computes the "
            f"logits, head=...; it has {_some_names(modules)}"
        )
    return with_weights[-1]


def _last_layer(module: nn.Module, *, any_size: bool = False) -> str | None:
    """Return the name within a module of its last layer that can compute logits; "" for the module itself."""
    fitting = [name for name, part in module.named_modules() if _is_head(part, any_size=any_size)]
    return fitting[-1] if fitting else None


def _is_head(module: nn.Module, *, any_size: bool = False) -> bool:
    """Return whether a layer can compute logits from the features at its place."""
    if isinstance(module, _ConvNd):
        return any_size or all(side == 1 for side in module.kernel_size)
    return is_linear(module)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _some_names(modules: dict[str, nn.Module]) -> str:
    names = [name for name, module in modules.items() if _is_head(module, any_size=True)]
    return ", ".join(map(repr, names[-5:])) or "no linear layer or convolution"


def record_features_(net: nn.Module, head: str) -> None:
    """Let the classifier of a network, and of its copies, record its input for :func:`features_and_logits`.

    Args:
        net: The network.
        head: The name that :func:`find_head` returned.
    """
    net.get_submodule(head).register_forward_pre_hook(RecordFeatures())


def get_head(net: nn.Module) -> Any:
    """Return the classifier of a network that records features.

    Args:
        net: A network after :func:`record_features_`, or a copy of one.

    Returns:
        The layer: a function of features. Its weights are :func:`head_weight`.
    """
    for module in net.modules():
        if any(isinstance(hook, RecordFeatures) for hook in module._forward_pre_hooks.values()):
            return module
    raise ConfigError("the network does not record features: call use_head() before copying the source")


def features_and_logits(net: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of the classifier and the logits, in one pass.

    Args:
        net: A network after :func:`record_features_`, a copy of one, or a function that calls one, such as a view.
        x: A batch.

    Returns:
        Features (N, d), or (N, d, ...) before logits are resized for pixels, and logits (N, C, ...).

    Raises:
        ConfigError: The head did not run exactly once, or its input is not one vector per element.
    """
    recorded: list[Tensor] = []
    with change_call(features=recorded):
        logits = net(x)
    if len(recorded) != 1:
        raise ConfigError(
            f"the head of the network ran {len(recorded)} times in one pass, and features need exactly one: name "
            "another layer, head=..."
        )
    (features,) = recorded
    is_tokens = features.ndim == 3 and logits.ndim == 2
    if len(features) != len(logits) or is_tokens:
        raise ConfigError(
            f"the head got features of shape {tuple(features.shape)} for logits of shape {tuple(logits.shape)}: name "
            "the layer that computes the logits from one vector per image, head=..."
        )
    # Some networks classify (N, d, 1, 1) and flatten afterwards.
    return (features.flatten(1) if logits.ndim == 2 else features), logits


@torch.no_grad()
def head_weight(net: nn.Module) -> Tensor:
    """Return the weights of the classifier as one row per class.

    Args:
        net: A network after :func:`record_features_`, or a copy of one.

    Returns:
        (C, d), a copy.
    """
    return layer_weight(get_head(net)).clone().flatten(1)


@torch.no_grad()
def shift_features_(net: nn.Module, head: str, shift: Tensor) -> None:
    """Let a classifier answer as if its features were shifted, by its bias; one without a bias gets one.

    Args:
        net: The network.
        head: The name that :func:`find_head` returned.
        shift: What is added to features (d).
    """
    layer: Any = net.get_submodule(head)
    weight = layer_weight(layer)
    moved = (weight.flatten(1).to(shift) @ shift).to(weight)
    if _is_quantized(layer):
        bias = layer.bias()
        layer.set_weight_bias(layer.weight(), moved if bias is None else bias.detach() + moved)
    else:
        layer.bias = nn.Parameter(moved if layer.bias is None else layer.bias + moved, layer.weight.requires_grad)


@torch.no_grad()
def replace_head_weight_(net: nn.Module, head: str, weight: Tensor) -> None:
    """Let a classifier multiply features by other weights, without a bias.

    A quantized classifier becomes a layer of floats, as rounding the weights would change its answers.

    Args:
        net: The network.
        head: The name that :func:`find_head` returned.
        weight: One row per class (C, d).
    """
    layer: Any = net.get_submodule(head)
    if _is_quantized(layer):
        layer = nn.utils.skip_init(
            nn.Linear, layer.in_features, layer.out_features, bias=False, dtype=weight.dtype, device=weight.device
        ).train(layer.training)
        net.set_submodule(head, layer)
    layer.weight.copy_(weight.view_as(layer.weight))
    if layer.bias is not None:
        layer.bias.zero_()


def is_linear(module: nn.Module) -> bool:
    """Return whether a layer is linear: of floats, or one that torch has quantized."""
    return isinstance(module, nn.Linear) or _is_quantized(module)


def _is_quantized(module: nn.Module) -> bool:
    """Return whether a layer is linear and quantized; told by structure, as its class is moving to another package."""
    return hasattr(module, "in_features") and callable(getattr(module, "weight", None))


def has_quantized_layers(net: nn.Module) -> bool:
    """Return whether a network has linear layers that torch has quantized, through which there is no gradient."""
    return any(map(_is_quantized, net.modules()))


def layer_weight(layer: Any) -> Tensor:
    """Return the weights of a linear layer or a convolution; those of a quantized layer as floats.

    Args:
        layer: The layer, for which :func:`is_linear` may hold.

    Returns:
        The weights (C, d, ...), without gradient.
    """
    weight: Tensor = layer.weight().dequantize() if _is_quantized(layer) else layer.weight
    return weight.detach()


def count_classes(net: nn.Module, head: str | None = None) -> int:
    """Return the number of classes that the head of a network distinguishes.

    Args:
        net: Any network.
        head: The name of the head; by default it is found.

    Returns:
        The number of outputs of the head.
    """
    layer: Any = net.get_submodule(find_head(net, head))
    return int(layer.out_features if is_linear(layer) else layer.out_channels)
