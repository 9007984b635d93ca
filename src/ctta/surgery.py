"""What is done to a copied network: unwrap it, read logits from it, choose which parameters train.

The copies keep the caller's class and every key of its ``state_dict``. What a method adds is a forward hook or a
forward pre-hook, so it survives ``eval()``, ``deepcopy`` and pickle, and :func:`copy_without_hooks` takes it off again.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ctta.norms import (
    BatchStatistics,
    avoid_group_norm_crash_,
    make_contiguous_if_constant,
    use_batch_statistics_,
)

#: How to find the logits in what a network returns: a key, an index, or a function of the output.
Output = str | int | Callable[[Any], Tensor] | None


def unwrap(net: nn.Module) -> nn.Module:
    """The network inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel`` wrappers."""
    while True:
        if isinstance(inner := getattr(net, "_orig_mod", None), nn.Module):
            net = inner
        elif isinstance(net, DataParallel | DistributedDataParallel):
            net = net.module
        else:
            return net


def copy_for_adaptation(net: nn.Module, *, batch_stats: float, output: Output) -> nn.Module:
    """A copy in eval mode (dropout off) whose calls return logits and whose BatchNorms use ``batch_stats``."""
    net = copy_without_hooks(net)
    net.register_forward_pre_hook(clone_input)
    net.register_forward_hook(ExtractLogits(output))
    avoid_group_norm_crash_(net)
    if batch_stats > 0:
        use_batch_statistics_(net, batch_stats)
    return net


def copy_without_hooks(net: nn.Module) -> nn.Module:
    """A copy in eval mode, of the caller's class, with nothing of ours on it."""
    # Outside inference mode, or the copies would be inference tensors, which cannot be trained.
    with torch.inference_mode(False):
        net = copy.deepcopy(unwrap(net))
    for module in net.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
        if isinstance(module, _BatchNorm):
            module.track_running_stats = module.running_mean is not None
    return net.eval()


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, ExtractLogits | BatchStatistics) or hook in (clone_input, make_contiguous_if_constant)


def clone_input(net: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook of a network: it gets a copy, since some normalise or rectify their input in place."""
    return (inputs[0].clone(), *inputs[1:])


@dataclass(frozen=True)
class ExtractLogits:
    """Forward hook: a network's output becomes its logits, dense ones resized to the input."""

    output: Output

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], raw: Any) -> Tensor:
        logits, x = self.pick(raw), inputs[0]
        if logits.ndim < 2 or len(logits) != len(x):
            raise ValueError(
                f"the network answered shape {tuple(logits.shape)} to a batch of shape {tuple(x.shape)}; "
                "expected (batch, classes, ...): is the batch dimension missing?"
            )
        if logits.ndim > 2 and logits.ndim == x.ndim and logits.shape[2:] != x.shape[2:]:
            return resize(logits, x.shape[2:])
        return logits

    def pick(self, raw: Any) -> Tensor:
        if callable(self.output):
            raw = self.output(raw)
        elif self.output is not None:
            raw = raw[self.output]
        elif isinstance(raw, dict) and ("out" in raw or "logits" in raw):
            raw = raw["out"] if "out" in raw else raw["logits"]
        elif not isinstance(raw, Tensor):
            raw = getattr(raw, "logits", raw)
        if not isinstance(raw, Tensor):
            raise TypeError(
                f"the network returned a {type(raw).__name__}, in which no logits were found; say where they are: "
                "output=0 (an index), output='key', or output=lambda out: out[0]"
            )
        return raw


def resize(x: Tensor, size: Iterable[int]) -> Tensor:
    """Linear interpolation of (N, C, ...) to a spatial size, as the authors' code resizes images and maps."""
    mode = {3: "linear", 4: "bilinear", 5: "trilinear"}.get(x.ndim)
    if mode is None:
        raise ValueError(f"expected images (N, C, ...) with one to three spatial axes, got shape {tuple(x.shape)}")
    return F.interpolate(x, size=tuple(size), mode=mode, align_corners=False)


def train_only_(net: nn.Module, names: Collection[str]) -> None:
    """Let exactly the parameters of these names require grad."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in names)


def infer_input_rank(net: nn.Module) -> int | None:
    """How many axes the input of the first convolution has, batch included; None without convolutions."""
    first = next((module for module in net.modules() if isinstance(module, _ConvNd)), None)
    return None if first is None else len(first.kernel_size) + 2


def iter_inputs(batches: Iterable[Any]) -> Iterator[Tensor]:
    """The inputs of batches that may be bare tensors or (images, labels, ...) tuples, as loaders give them."""
    if isinstance(batches, Tensor):
        raise TypeError("expected an iterable of batches, got a single tensor: give [x]")
    for batch in batches:
        if not isinstance(batch, Tensor | tuple | list):
            raise TypeError(f"expected batches as tensors or (inputs, ...) tuples, got a {type(batch).__name__}")
        yield batch if isinstance(batch, Tensor) else batch[0]
