"""What is done to a copied network: unwrap it, check its inputs, extract its logits, choose which parameters train.

The copies keep the caller's class and every key of its ``state_dict``. What a method adds is a forward hook or forward
pre-hook, so it survives ``eval()``, ``deepcopy`` and pickle, and :func:`copy_without_hooks` removes it again.
"""

import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ctta.core.parallel import check_flag
from ctta.errors import ConfigError, InputError
from ctta.io.tensors import to_bytes
from ctta.nn import BatchStats, find_norm_parameters, unmask_running_statistics, use_batch_statistics_
from ctta.nn.heads import find_head
from ctta.nn.norm import HOOK_TABLES, ContiguousInput, NetworkHook, remove_hooks_

#: Where the logits are in the output of a network: a key, an index, or a function of the output.
Output = str | int | Callable[[Any], Tensor] | None


def unwrap(net: nn.Module) -> nn.Module:
    """Return the network inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel`` wrappers."""
    while True:
        if isinstance(inner := getattr(net, "_orig_mod", None), nn.Module):
            net = inner
        elif isinstance(net, DataParallel | DistributedDataParallel):
            net = net.module
        else:
            return net


def check_network(net: nn.Module) -> None:
    """Raise a ConfigError for a network that cannot be copied, hooked or trained, and say what to do about it."""
    for name, module in net.named_modules():
        place = f"layer {name!r} of the network" if name else "the network"
        norms = (each for each in module.modules() if "Norm" in getattr(each, "original_name", ""))
        if isinstance(module, torch.jit.ScriptModule) and (not name or next(norms, None) is not None):
            raise ConfigError(f"{place} is a ScriptModule, which takes no hooks: give the Python network behind it")
        tensors = chain(module._parameters.values(), module._buffers.values())
        if any(map(is_lazy, tensors)):
            raise ConfigError(f"{place} has no weights yet: call the network on a batch once before wrapping it")
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise ConfigError(
                    f"{place} computes its {attribute!r} from other parameters and keeps the graph, so it cannot be "
                    "copied: use torch.nn.utils.parametrizations (such as weight_norm there), or remove it first "
                    "(torch.nn.utils.remove_weight_norm)"
                )


def copy_for_adaptation(net: nn.Module, *, batch_stats: BatchStats, output: Output) -> nn.Module:
    """Return a copy in eval mode (dropout off) that returns logits and whose BatchNorms use ``batch_stats``."""
    check_network(unwrap(net))
    net = copy_without_hooks(net)
    net.register_forward_pre_hook(CloneInput())
    net.register_forward_hook(ExtractLogits(output))
    for module in net.modules():
        if isinstance(module, nn.GroupNorm):
            ContiguousInput().attach_(module)
    if batch_stats != 0:
        use_batch_statistics_(net, batch_stats)
    return net


def copy_without_hooks(net: nn.Module, keep: Collection[int] | None = None) -> nn.Module:
    """Return a copy in eval mode of the unwrapped network, without the hooks of this library.

    Args:
        net: The network.
        keep: The ids of the only other hooks that may stay, of :func:`find_hooks`; None for all.
    """
    # Outside inference mode, because copies made within it are inference tensors, which cannot be trained.
    with torch.inference_mode(False):
        net = unwrap(net)
        originals = {id(each): _originals[each].clone() for each in net.buffers() if each in _originals}
        net = copy.deepcopy(net, originals)
    for module in net.modules():
        remove_hooks_(module, lambda key, hook: isinstance(hook, NetworkHook) or (keep is not None and key not in keep))
        if isinstance(module, _BatchNorm):
            unmask_running_statistics(module)
            module.track_running_stats = module.running_mean is not None
    return net.eval()


def find_hooks(net: nn.Module) -> frozenset[int]:
    """Return the ids of the hooks of a network that are not this library's; copies of the hooks have the same ids."""
    hooks = [item for module in net.modules() for item in _iter_hooks(module)]
    return frozenset(key for key, hook in hooks if not isinstance(hook, NetworkHook))


def copy_sharing_tensors(net: nn.Module) -> nn.Module:
    """Return a second tree of modules over the same parameters and buffers.

    Layers hold the mode of the call in progress, so streams, which may run in several threads, share tensors only.
    """
    return copy.deepcopy(net, {id(each): _originals.get(each, each) for each in (*net.parameters(), *net.buffers())})


@contextmanager
def keep_buffers(*networks: nn.Module) -> Iterator[None]:
    """Let networks that write to their persistent buffers when they are called do so on copies within the context.

    Networks that are copied meanwhile get the originals. Statistics of norm layers are left out: their hooks decide
    when those change.
    """
    found = [
        (module._buffers, name, buffer)
        for net in networks
        for module in net.modules()
        if not isinstance(module, _NormBase)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    clones = {id(buffer): buffer.clone() for _, _, buffer in found}  # one for modules that share a buffer
    try:
        for buffers, name, buffer in found:
            buffers[name] = clones[id(buffer)]
            _originals[clones[id(buffer)]] = _originals.get(buffer, buffer)
        yield
    finally:
        for buffers, name, buffer in found:
            buffers[name] = buffer


#: The buffers that copies stand for within :func:`keep_buffers`.
_originals: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()


def find_untraceable_hooks(net: nn.Module) -> list[str]:
    """Return the names of this library's hooks on a network that ``torch.compile`` cannot trace: they keep a state."""
    hooks = [hook for module in net.modules() for _, hook in _iter_hooks(module)]
    return sorted({type(hook).__name__ for hook in hooks if isinstance(hook, NetworkHook) and not hook.is_traceable})


def _iter_hooks(module: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the id of each hook, and the object that it is, or is a method of."""
    for table in HOOK_TABLES:
        for key, hook in vars(module)[table].items():
            yield key, getattr(hook, "__self__", hook)


def returns_logits(net: nn.Module) -> bool:
    """Return whether a network was prepared for adaptation, or is a copy of one that was."""
    return any(isinstance(hook, ExtractLogits) for hook in net._forward_hooks.values())


@dataclass(frozen=True)
class CloneInput(NetworkHook):
    """A forward pre-hook that gives a network a copy of its input, since some change it in place."""

    is_traceable = True

    def __call__(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the inputs, the first one as a copy."""
        return (inputs[0].clone(), *inputs[1:])


#: Names in the outputs of networks for other tasks, and what these networks need.
OTHER_TASKS = {
    ("boxes", "pred_boxes"): "which has boxes: use ctta.detect(net), which adapts detectors, see "
    "docs/tutorials/detectors.md",
    ("image_embeds", "logits_per_image"): "which belongs to a CLIP model: wrap its image encoder and the embeddings of "
    "the class names to a classifier, see docs/how-to/other-libraries.md#clip",
}


def _recognize(raw: Any) -> str | None:
    """Return what to do with the output of a network for another task, if it is one."""
    first = raw[0] if isinstance(raw, list | tuple) and raw else raw
    for names, hint in OTHER_TASKS.items():
        if any(name in first if isinstance(first, dict) else hasattr(first, name) for name in names):
            return hint
    return None


class MissingLogitsError(ConfigError):
    """Raised if the output of a network does not hold logits where they are expected."""


@dataclass(frozen=True)
class ExtractLogits(NetworkHook):
    """A forward hook that reduces the output of a network to its logits, and resizes dense logits to the input.

    Attributes:
        output: Where the logits are; None to look in the usual places.
    """

    is_traceable = True
    output: Output

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], raw: Any) -> Tensor:
        """Return the logits in the output ``raw``."""
        logits, x = self.select(raw), inputs[0]
        if logits.ndim < 2 or len(logits) != len(x):
            raise ConfigError(
                f"the network returned logits of shape {tuple(logits.shape)} for a batch of shape {tuple(x.shape)}; "
                "expected (batch, classes, ...): is the batch dimension missing?"
            )
        if logits.ndim > 2 and logits.ndim == x.ndim and logits.shape[2:] != x.shape[2:]:
            return resize(logits, x.shape[2:])
        return logits

    def select(self, raw: Any) -> Tensor:
        """Return the tensor of logits, of whatever shape, in the output ``raw``."""
        found = raw
        if callable(self.output):
            found = self.output(raw)
        elif self.output is not None:
            try:
                found = raw[self.output]
            except (LookupError, TypeError) as error:
                raise MissingLogitsError(
                    f"the network returned a {type(raw).__name__}, in which there is no {self.output!r}: give another "
                    "output"
                ) from error
        elif hint := _recognize(raw):
            raise MissingLogitsError(f"the network returned a {type(raw).__name__}, {hint}")
        elif isinstance(raw, dict) and ("out" in raw or "logits" in raw):
            found = raw["out"] if "out" in raw else raw["logits"]
        elif not isinstance(raw, Tensor):
            found = getattr(raw, "logits", raw)
        if not isinstance(found, Tensor):
            raise MissingLogitsError(
                f"the network returned a {type(found).__name__}, in which no logits were found; say where they are: "
                "output=0 (an index), output='key', or output=lambda out: out[0]"
            )
        return found


def resize(x: Tensor, size: Iterable[int]) -> Tensor:
    """Resize (N, C, ...) to a spatial size by linear interpolation, as CoTTA's code resizes images and logits."""
    mode = {3: "linear", 4: "bilinear", 5: "trilinear"}.get(x.ndim)
    if mode is None:
        raise InputError(f"expected images (N, C, ...) with one to three spatial axes, got shape {tuple(x.shape)}")
    return F.interpolate(x, size=tuple(size), mode=mode, align_corners=False)


def names_outside(names: Iterable[str], layers: Iterable[str]) -> set[str]:
    """Return those names of parameters that are not below any of the layers."""
    layers = tuple(layers)
    return {name for name in names if not _is_within(name, layers)}


def train_only_(net: nn.Module, names: Collection[str]) -> None:
    """Let exactly the parameters of these names require grad."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in names)


def find_convolution_parameters(net: nn.Module) -> set[str]:
    """Return the names of the trainable kernels and biases of convolutions."""
    layers = [module for module in net.modules() if isinstance(module, _ConvNd)]
    found = {id(value) for layer in layers for value in layer.parameters(recurse=False)}
    return {name for name, value in net.named_parameters() if value.requires_grad and id(value) in found}


def find_top_layers(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers nearest to the output that SAR and its successors do not train.

    These are, by structure and not by name, the last quarter of the network's stages (ResNet: the last of four) or
    blocks (ViT: the last three of twelve), rounded down but at least one, and the norm layers from there to the head. A
    network without repeated parts has its last norm layer there, if it has more than one.

    Args:
        net: Any network.

    Returns:
        Names of modules; all parameters below them belong to the top.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> find_top_layers(net)
    ('3',)
    """
    layers = _norm_layers_before_head(net)
    parent, parts = _find_repeated_parts(net)
    if not parts:
        return tuple(layers[-1:] if len(layers) > 1 else ())
    num_top = max(1, len(parts) // 4)
    top = [_join(parent, name) for name in parts[-num_top:]]
    trunk = [_join(parent, name) for name in parts]
    order = [name for name, _ in net.named_modules()]
    end = max(number for number, name in enumerate(order) if _is_within(name, trunk))
    for name in layers:
        if order.index(name) > end and not _is_within(name, trunk):
            owner, _, index = name.rpartition(".")
            # A list with a norm for each stage, beside the list of stages: only those of the top belong to it.
            is_per_stage = index.isdecimal() and len(list(net.get_submodule(owner).children())) == len(parts)
            if not is_per_stage or int(index) >= len(parts) - num_top:
                top.append(name)
    return tuple(top)


def _norm_layers_before_head(net: nn.Module) -> list[str]:
    """Return the names of the norm layers in order, without those after the classifier, which do not lead to it."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in _norm_parameter_names(net)))
    order = [name for name, _ in net.named_modules()]
    try:
        head = order.index(find_head(net))
    except ConfigError:
        return layers
    return [name for name in layers if order.index(name) < head] or layers


def _find_repeated_parts(net: nn.Module, prefix: str = "") -> tuple[str, list[str]]:
    """Return a module and the names of its children that are the network's stages or blocks; none if there are no such.

    Alike are children of one class with parts of one class. Of several kinds the one with the most norm layers counts.
    """
    children = {name: child for name, child in net.named_children() if _num_norms(child)}
    kinds: dict[tuple[type, ...], list[str]] = {}
    for name, child in children.items():
        if list(child.children()):  # a single norm layer is no block
            kinds.setdefault(_kind(child), []).append(name)
    repeated = [names for names in kinds.values() if len(names) > 1]
    if repeated:
        return prefix, max(repeated, key=lambda names: sum(_num_norms(children[name]) for name in names))
    blocks = [name for names in kinds.values() for name in names]
    if not blocks:
        return prefix, []
    largest = max(blocks, key=lambda name: _num_norms(children[name]))
    return _find_repeated_parts(children[largest], _join(prefix, largest))


def _kind(module: nn.Module) -> tuple[type, ...]:
    """Return the class of a module, and for a container the kind of its first part too."""
    first = next(module.children(), None)
    is_container = isinstance(module, nn.Sequential | nn.ModuleList) and first is not None
    return (type(module), *(_kind(first) if is_container and first is not None else ()))


def _num_norms(module: nn.Module) -> int:
    return len(_norm_parameter_names(module))


def _norm_parameter_names(module: nn.Module) -> list[str]:
    """Return the names of trainable norm parameters in the order of the network."""
    found = find_norm_parameters(module)
    return [name for name, _ in module.named_parameters() if name in found]


def _is_within(name: str, owners: Iterable[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def share_parameters_(net: nn.Module, other: nn.Module) -> None:
    """Let a network use the parameters of another one with the same modules; it keeps its own buffers."""
    for name, module in net.named_modules():
        module._parameters.update(other.get_submodule(name)._parameters)


def infer_input_rank(net: nn.Module) -> int | None:
    """Return the number of axes of the first convolution's input, batch included; None without convolutions."""
    first = next((module for module in net.modules() if isinstance(module, _ConvNd)), None)
    return None if first is None else len(first.kernel_size) + 2


def check_input_rank(net: nn.Module, x: Tensor, error: Exception) -> None:
    """Raise an InputError for an error of a network if x has another number of axes than its convolutions expect.

    It is asked only once the network has failed, because a network may add or fold axes before its first convolution.

    Args:
        net: The network.
        x: The batch.
        error: What the network raised.
    """
    rank = None if isinstance(error, MissingLogitsError) else infer_input_rank(net)
    if rank is not None and x.ndim != rank:
        hint = ": for one image call x.unsqueeze(0)" if x.ndim == rank - 1 else ""
        raise InputError(
            f"expected a batch with {rank} axes for the network's convolutions, got shape {tuple(x.shape)}{hint}"
        ) from error


def check_batch(x: Tensor) -> None:
    """Raise unless x is a batch of finite floating-point inputs; it may be empty."""
    check_batch_format(x)
    error = "the input holds NaN or infinite values; nothing was predicted or changed: drop or repair the batch"
    check_flag(x.isfinite().all(), lambda: InputError(error))


def check_batch_format(x: Tensor) -> None:
    """Raise unless x is a batch of floating-point inputs, of whatever values."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a batch of inputs as a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"expected floating-point inputs, got {x.dtype}: for byte images call x.float() / 255 first")
    if x.ndim < 2:
        raise InputError(f"expected a batch of inputs, got shape {tuple(x.shape)}: for one input call x.unsqueeze(0)")


def explain_memory(x: Tensor, attempt: Callable[[Tensor], object] | None, hint: str = "", last_hint: str = "") -> str:
    """Return a sentence on a batch that does not fit into the memory, with the size of one that does.

    Args:
        x: The batch. No frame may hold what its failure has allocated.
        attempt: Does the same with a half, a quarter and so on of the batch; None to try nothing.
        hint: What else helps if one fits.
        last_hint: What else helps if none does.
    """
    problem = f"{x.device} has not enough memory for a batch of {len(x)} inputs of {'x'.join(map(str, x.shape[1:]))}"
    size = len(x) // 2 if attempt is not None else 0
    while attempt is not None and size:
        try:
            attempt(x[:size])
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None  # or its frames would hold what the attempt has allocated
            size //= 2
        except Exception:  # a library that has no memory left, or a batch that is too small
            break
        else:
            return f"{problem}: one of {size} fits, so use a batch size of {size}{hint}"
    return f"{problem}: use smaller batches or inputs{last_hint}"


def find_weight(net: nn.Module) -> Tensor:
    """Return a weight of a network, whose device and data type its input has to have; an empty tensor without any."""
    return next((each for each in net.parameters() if each.is_floating_point()), torch.empty(0))


def iter_inputs(batches: Iterable[Any], net: nn.Module) -> Iterator[Tensor]:
    """Yield the inputs of batches after :func:`check_batch`, on the device of a network.

    The batches are tensors or (inputs, labels, ...) tuples, as data loaders return them.
    """
    if isinstance(batches, Tensor):
        raise TypeError("expected an iterable of batches, got a single tensor: give [x]")
    for batch in batches:
        if not isinstance(batch, Tensor | tuple | list):
            raise TypeError(f"expected batches as tensors or (inputs, ...) tuples, got a {type(batch).__name__}")
        x = batch if isinstance(batch, Tensor) else batch[0]
        check_batch(x)
        yield x.to(find_weight(net).device, non_blocking=True)


def fingerprint(net: nn.Module) -> str:
    """Return a hash of every weight and buffer of a network.

    Args:
        net: Any network; compiled and data-parallel wrappers are removed.

    Returns:
        32 hexadecimal digits, equal for equal networks on any device.

    >>> fingerprint(nn.Identity())
    'e3b0c44298fc1c149afbf4c8996fb924'
    """
    digest = hashlib.sha256()
    for name, value in unwrap(net).state_dict().items():
        for part in value if isinstance(value, tuple) else (value,):  # weight and bias of a quantized layer
            if isinstance(part, Tensor):
                digest.update(f"{name} {part.dtype} {tuple(part.shape)}\n".encode())
                for content in (part.int_repr(), part.dequantize()) if part.is_quantized else (part,):
                    digest.update(to_bytes(content))
    return digest.hexdigest()[:32]


# By the first tensor of a network, since forks have modules of their own over the same tensors.
_cache: MutableMapping[Tensor, tuple[tuple[tuple[int, int], ...], str]] = WeakIdKeyDictionary()


def source_fingerprint(source: nn.Module) -> str:
    """Return the fingerprint of a source network, cached because streams never change it and forks share it.

    In-place writes by the user (``load_state_dict``) are noticed by the version numbers of the tensors.
    """
    tensors = [value for value in source.state_dict(keep_vars=True).values() if isinstance(value, Tensor)]
    if not tensors:
        return fingerprint(source)
    versions = tuple((id(value), value._version) for value in tensors)
    if tensors[0] not in _cache or _cache[tensors[0]][0] != versions:
        _cache[tensors[0]] = versions, fingerprint(source)
    return _cache[tensors[0]][1]
