"""The baseline of step times: the network alone, in the same norm mode and the faster memory layout."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.speed.measurements import seconds


def use_batch_statistics_(net: nn.Module) -> nn.Module:
    """Let BatchNorm use the statistics of the batch, with everything else in eval mode."""
    for module in net.eval().modules():
        if isinstance(module, _BatchNorm):
            module.train()
            module.track_running_stats = False
    return net


def faster_layout(build: Callable[[], nn.Module], x: Tensor, run: Callable[[nn.Module, Tensor], object]) -> nn.Module:
    """Return the network in the memory layout in which ``run`` is faster."""
    nets = [
        use_batch_statistics_(build()).to(memory_format=layout)  # type: ignore[call-overload]
        for layout in (torch.contiguous_format, torch.channels_last)
    ]
    rounds = [[seconds(partial(run, net, x)) for net in nets] for _ in range(4)]
    times = [min(column) for column in zip(*rounds, strict=True)]
    faster: nn.Module = nets[times.index(min(times))]
    return faster


@torch.no_grad()
def forward(net: nn.Module, x: Tensor) -> Tensor:
    """Run a forward pass without gradients."""
    logits: Tensor = net(x)
    return logits


def forward_backward(net: nn.Module, x: Tensor) -> None:
    """Run a forward and a backward pass."""
    logits = net(x)
    F.cross_entropy(logits, logits.detach().softmax(1)).backward()
    net.zero_grad()
