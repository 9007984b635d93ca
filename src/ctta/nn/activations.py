"""Fewer activations for the backward pass, with the same gradients.

torch keeps the input of every convolution and the output of every ReLU, also of layers that do not train. Two things
can be done about it, see :meth:`ctta.AdaptiveModel.reduce_memory`: keep what the gradients of the trained layers need
and nothing else, or keep only the inputs of blocks and compute the rest again (gradient checkpointing).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from ctta.errors import ConfigError
from ctta.nn import find_norm_parameters
from ctta.nn.surgery import find_untraceable_hooks

#: What is kept: only what trained layers need, or only the inputs of blocks.
MemoryReduction = Literal["frozen", "checkpoint"]


@dataclass(frozen=True)
class ActivationPlan:
    """What the trained network of a model and of its forks keeps for the backward pass.

    Attributes:
        skips_frozen: Whether layers that do not train keep nothing that the others do without.
        blocks: The names of the blocks that are computed again; none without gradient checkpointing.
    """

    skips_frozen: bool
    blocks: tuple[str, ...] = ()

    @classmethod
    def make(cls, kind: MemoryReduction, net: nn.Module) -> "ActivationPlan":
        """Return the plan for a network as it is trained.

        Args:
            kind: What to keep.
            net: The network; which of its parameters require grad matters.

        Returns:
            The plan.

        Raises:
            ConfigError: There is nothing to gain, or computing a block again would change the result.
        """
        trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
        skips_frozen = trained <= find_norm_parameters(net)
        if kind == "frozen":
            if not skips_frozen:
                raise ConfigError(
                    'reduce_memory("frozen") is for methods that train norm layers only, and this one trains others, '
                    'which need their activations: use reduce_memory("checkpoint")'
                )
            return cls(skips_frozen)
        if hooks := find_untraceable_hooks(net):
            raise ConfigError(
                f"the method keeps a state in its layers ({', '.join(hooks)}), which would count a batch twice if "
                'blocks were computed again: reduce_memory("checkpoint") cannot be used with it'
            )
        blocks = tuple(iter_blocks(net))
        if len(blocks) < 2:
            raise ConfigError(
                f"gradient checkpointing needs a network made of blocks, each a module in a Sequential or ModuleList; "
                f"{type(net).__name__} has {len(blocks) or 'none'}"
            )
        # What the last block keeps is needed at once, so computing it again would not lower the peak.
        return cls(skips_frozen, blocks[:-1])

    def apply_(self, net: nn.Module) -> None:
        """Let a network follow the plan; copies of it start without.

        Args:
            net: The trained network, such as the student.
        """
        if net._compiled_call_impl is None and self.skips_frozen:
            net._compiled_call_impl = _FrugalCall(net)
        for name in self.blocks:
            block = net.get_submodule(name)
            if block._compiled_call_impl is not None:
                break
            block._compiled_call_impl = _CheckpointedCall(block, self.skips_frozen)


def iter_blocks(net: nn.Module) -> Iterator[str]:
    """Yield the names of the blocks of a network: modules with parts, in a list or sequence of modules.

    Args:
        net: The network.

    Yields:
        Names for ``net.get_submodule``, in the order of the network.
    """
    containers = nn.Sequential | nn.ModuleList | nn.ModuleDict
    for name, child in net.named_children():
        if isinstance(net, containers) and not isinstance(child, containers) and next(child.children(), None):
            yield name
        else:
            yield from (f"{name}.{inner}" for inner in iter_blocks(child))


class _FrugalCall:
    """What a network runs when it is called, so that frozen layers keep little."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.net._call_impl(*inputs, **options)
        with _SkipFrozen():
            return self.net._call_impl(*inputs, **options)


class _CheckpointedCall:
    """What a block runs when it is called: its hooks, and a forward pass that is computed again for the backward."""

    def __init__(self, block: nn.Module, skips_frozen: bool) -> None:
        self.block, self.skips_frozen = block, skips_frozen

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not (torch.is_grad_enabled() and self._has_gradient(inputs, options)):
            return self.block._call_impl(*inputs, **options)
        # Hooks of the block itself are not part of what is repeated: they may be gone by then.
        forward, attributes = self.block.forward, vars(self.block)
        own = {name: value for name, value in attributes.items() if name == "forward"}
        attributes["forward"] = partial(self._checkpoint, forward)
        try:
            return self.block._call_impl(*inputs, **options)
        finally:
            del attributes["forward"]
            attributes.update(own)

    def _checkpoint(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        context = copy_context()  # the statistics in use, which the backward pass may be outside of

        def run(*given: Any, **named: Any) -> Any:
            with _SkipFrozen() if self.skips_frozen else nullcontext():
                return context.copy().run(forward, *given, **named)

        return checkpoint(run, *inputs, use_reentrant=False, **options)

    def _has_gradient(self, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        given = (value for value in (*inputs, *options.values()) if isinstance(value, Tensor))
        return any(value.requires_grad for value in (*given, *self.block.parameters()))


class _SkipFrozen(TorchFunctionMode):
    """Replace operations within the context that keep more than their gradient needs if no weights train."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is None or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return replacement(func, *args, **(kwargs or {}))


def _relu(func: Callable[..., Tensor], input: Tensor, inplace: bool = False) -> Tensor:
    inplace = inplace or getattr(func, "__name__", "").endswith("_")
    if not input.requires_grad or (inplace and input._is_view()):
        return func(input, inplace=inplace) if func is F.relu else func(input)
    rectified: Tensor = _ReLUByMask.apply(input, inplace)  # type: ignore[no-untyped-call]
    return rectified


def _convolve(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    settings = stride, padding, dilation, groups
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    is_plain = input.ndim == weight.ndim and not isinstance(padding, str)
    if trains or not input.requires_grad or not is_plain or torch.is_autocast_enabled(input.device.type):
        return func(input, weight, bias, *settings)
    convolved: Tensor = _FrozenConvolution.apply(func, input, weight, bias, settings)  # type: ignore[no-untyped-call]
    return convolved


class _ReLUByMask(Function):
    """A ReLU that keeps a byte for each value, where torch keeps the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        result = x.relu_() if inplace else x.relu()
        ctx.save_for_backward(result <= 0)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (is_off,) = ctx.saved_tensors
        return torch.where(is_off, gradient.new_zeros(()), gradient), None  # in the layout of the input


class _FrozenConvolution(Function):
    """A convolution whose weights do not train, so that the gradient does not need its input."""

    @staticmethod
    def forward(
        ctx: Any, func: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, settings: Any
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.stride, ctx.settings = x.shape, x.stride(), settings
        return func(x, weight, bias, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        num_axes, (*sizes, groups) = len(ctx.shape) - 2, ctx.settings
        stride, padding, dilation = ([size] * num_axes if isinstance(size, int) else list(size) for size in sizes)
        # Nobody reads its values; shape and layout make torch choose the kernel that it chooses for the input.
        like_input = gradient.new_empty_strided(ctx.shape, ctx.stride)
        of_input, _, _ = torch.ops.aten.convolution_backward(
            gradient,
            like_input,
            weight,
            None,
            stride,
            padding,
            dilation,
            False,
            [0] * num_axes,
            groups,
            [True, False, False],
        )
        return None, of_input, None, None, None


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_), _relu),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolve),
}
