"""Normalization layers: their parameters, and BatchNorm on statistics of the batch, alone or blended with others."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from typing_extensions import override

from ctta.core.parallel import LocalReducer, current_call, current_reducer
from ctta.errors import ConfigError, InputError
from ctta.nn.moments import batch_var_mean, blend_with_batch, carry_blended_gradient, fix_stride_of_one

#: Batches of at least this many images are normalized by their own statistics under "auto".
FULL_BATCH_SIZE = 16
#: How many images the source's statistics count for where they are blended by the size of the batch.
PRIOR_SIZE = 48

#: A fraction of the batch in the statistics, or how the size of the batch decides it, see :func:`automatic_fraction`.
BatchStats = float | Literal["auto", "blend"]


def automatic_fraction(num_images: int, rule: Literal["auto", "blend"] = "auto") -> float:
    """Return the fraction of the batch in the statistics for a batch of this size.

    Statistics of few images are noisy, so the source's count as if they came from further images. Under ``"blend"``
    this holds for every size; under ``"auto"`` from 16 images on the batch's are used alone, as methods are published.
    Both sizes were chosen by ``benchmarks/choose/small_batch.py``.

    >>> automatic_fraction(16), automatic_fraction(12), automatic_fraction(32, "blend")
    (1.0, 0.2, 0.4)
    """
    if rule == "auto" and num_images >= FULL_BATCH_SIZE:
        return 1.0
    return num_images / (num_images + PRIOR_SIZE)


#: Where a module keeps its hooks.
HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class NetworkHook:
    """Base of the forward hooks and pre-hooks that this library puts on copied networks, and takes off them again."""

    #: Whether ``torch.compile`` can trace it, and a block with it can be computed again; not if it keeps a state.
    is_traceable: ClassVar[bool] = False


class NormHook(NetworkHook, ABC):
    """Base of everything that changes what a norm layer does.

    Its eager form is :meth:`before`. A hook that also has a traced form, which :meth:`before` takes where
    ``torch.compiler.is_compiling()``, sets ``is_traceable``. What it has to know about the batch is in
    :func:`ctta.core.parallel.current_call`.

    A hook with a state is an ``nn.Module`` too, with the state in its buffers. The method holds what
    :func:`attach_norm_hooks_` returns, so that the state is moved, saved, reset, forked and undone like any other. No
    hook stays on a deployed network.
    """

    @abstractmethod
    def before(self, layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Act before the layer; return its inputs, or None to leave them as they are.

        Args:
            layer: The layer.
            inputs: What it was called with.
        """

    def after(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Act after the layer; does nothing unless overridden.

        Args:
            layer: The layer.
            inputs: What it was called with.
            output: What it returned.
        """

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Run :meth:`before`, as a forward pre-hook."""
        return self.before(layer, inputs)

    def attach_(self, layer: nn.Module) -> None:
        """Let a layer run this hook from now on."""
        layer.register_forward_pre_hook(self)
        if type(self).after is not NormHook.after:
            layer.register_forward_hook(self.after)


def remove_hooks_(module: nn.Module, is_unwanted: Callable[[int, Any], bool]) -> None:
    """Remove hooks of a module by their number, or by the object that they are a method of."""
    for name in HOOK_TABLES:
        hooks = vars(module)[name]
        for number in [
            number for number, hook in hooks.items() if is_unwanted(number, getattr(hook, "__self__", hook))
        ]:
            for table in (hooks, *(vars(module).get(name + end, {}) for end in ("_with_kwargs", "_always_called"))):
                table.pop(number, None)


def attach_norm_hooks_(
    net: nn.Module, make: Callable[[_BatchNorm], NormHook], *, skip_without_statistics: bool = False
) -> nn.ModuleList:
    """Give every BatchNorm of a network a hook.

    Args:
        net: The network.
        make: Returns the hook of a layer; the same one for several if it keeps no state.
        skip_without_statistics: Whether to leave out layers that keep no running statistics, rather than to raise.

    Returns:
        The hooks that keep a state; the method must hold them.

    Raises:
        ConfigError: A layer keeps no running statistics.
    """
    if not skip_without_statistics and not has_running_statistics(net):
        raise ConfigError(
            "this method starts from the running statistics of BatchNorm layers, and one of the network's keeps none: "
            "use layers with track_running_stats=True"
        )
    layers = [layer for layer in net.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
    hooks = [make(layer) for layer in layers]
    for layer, hook in zip(layers, hooks, strict=True):
        hook.attach_(layer)
    return nn.ModuleList(hook for hook in hooks if isinstance(hook, nn.Module))


def find_norm_parameters(net: nn.Module) -> set[str]:
    """Return the names of the trainable scales and shifts of normalization layers.

    These are torch's layers, and modules whose class name contains "Norm" (timm, transformers and users write their
    own): of the latter only vectors, since a block with such a name may hold matrices.
    """
    return {name for name in _iter_norm_parameters(net) if net.get_parameter(name).requires_grad}


def find_norm_layers(net: nn.Module) -> set[str]:
    """Return the names of the normalization layers with scales or shifts, trainable or not."""
    return {name.rpartition(".")[0] for name in _iter_norm_parameters(net)}


def _iter_norm_parameters(net: nn.Module) -> Iterator[str]:
    known = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    for prefix, module in net.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, known) or ("Norm" in type(module).__name__ and parameter.ndim <= 1):
                yield f"{prefix}.{name}" if prefix else name


def has_running_statistics(net: nn.Module) -> bool:
    """Return whether every BatchNorm keeps running statistics, used or not."""
    return all(module.running_mean is not None for module in net.modules() if isinstance(module, _BatchNorm))


@torch.no_grad()
def estimate_running_statistics_(net: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the running statistics of a network without our hooks by their mean over the batches."""
    # torch.optim.swa_utils.update_bn does nearly this, but with dropout on, and silently without any batches.
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative average
        layer.train()
    num_batches = 0
    for x in batches:
        net(x)
        num_batches += 1
    if num_batches == 0:
        raise InputError("no batches to estimate running statistics from; give some, or leave batches out")
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    net.eval()


@dataclass(frozen=True)
class ContiguousInput(NormHook):
    """Make a channels-last input of a GroupNorm that needs no gradient contiguous.

    Without it the backward on the CPU (torch 2.13) writes the gradient of such an input through a null pointer. That
    happens to everyone who trains the first GroupNorm but not the convolution before it, as TENT does.
    """

    is_traceable = True

    @override
    def before(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = inputs
        is_constant = torch.is_grad_enabled() and not x.requires_grad
        return (x.contiguous() if is_constant else x, *others)


@dataclass
class TracedCall:
    """What a call of a compiled network depends on besides its input, where the compiler finds it.

    A context variable cannot be traced. :func:`prepare_traced_call` reads the call in progress before each call; the
    layers of a network share one object.

    Attributes:
        num_parts: How many parts have statistics of their own; None for the whole batch.
        fraction: The fraction of the batch in the statistics: 0, 1, or None if the tensor has it.
        blend: That fraction as a tensor, so that a new one needs no new code.
        is_prepared: Whether the above is set before each call; not if a user compiles a network of a method.
    """

    is_prepared: bool = False
    num_parts: int | None = None
    fraction: int | None = None
    blend: Tensor = field(default_factory=lambda: torch.zeros(()))


@dataclass(frozen=True)
class BatchStatistics(NormHook):
    """A forward pre-hook of a BatchNorm that normalizes by (1-m) * running + m * batch statistics.

    Running statistics are read, never written, and stay in the ``state_dict``. The hook sets the mode of its layer at
    each call, so a later ``eval()`` cannot silently bring the running statistics back.

    Attributes:
        fraction: M, the fraction of the batch statistics, or the rule of :func:`automatic_fraction`.
        traced: What the layer does within a compiled call.
    """

    is_traceable = True
    fraction: BatchStats
    traced: TracedCall = field(default_factory=TracedCall, compare=False, repr=False, kw_only=True)

    @override
    def before(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Set the mode of the layer, and blend its statistics or rescale its input unless it can do without."""
        if torch.compiler.is_compiling():
            if self.traced.is_prepared:
                return self.trace(module, inputs)
            # Not as a decorator, which would import the compiler, and double the time of ``import ctta``.
            interrupted: tuple[Tensor, ...] | None = torch.compiler.disable(self.interrupt)(module, inputs)
            return interrupted
        fraction, num_parts = self.set_mode_by_call_(module, inputs[0]), current_call().num_parts or 1
        unmask_running_statistics(module)
        if module.running_mean is not None:
            if (record := current_call().record) is not None:
                record[module] = self.use_and_return_statistics_(module, inputs[0], fraction)
                return None
            if (fixed := current_call().fixed_statistics) is not None:
                mean, variance = fixed[module]
                vars(module).update(running_mean=mean, running_var=variance)
        if fraction is None:
            return None
        if num_parts == 1 and not current_reducer().is_sharded:
            return self.blend_(module, inputs, fraction)
        return (self.rescale(module, inputs[0], num_parts, fraction), *inputs[1:])

    @override
    def after(self, module: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Let the running statistics be seen again that blended ones have hidden."""
        unmask_running_statistics(module)

    def set_mode_by_call_(self, module: _BatchNorm, x: Tensor) -> float | None:
        """Set the mode of the layer as the context says; return the fraction unless the layer can do without it."""
        num_parts, batch = current_call().num_parts, current_reducer()
        num_images = current_call().num_images or batch.total_count(len(x)) // (num_parts or 1)
        fraction = self.choose_fraction(module, num_images)
        if fraction == 1:
            _check_count(x, batch.total_count(x.numel()), num_parts)
        by_layer = fraction == 1 and num_parts is None and not batch.is_sharded
        self.set_mode_(module, by_layer)
        return None if by_layer or fraction == 0 else fraction

    def interrupt(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Rescale the input outside of the compiled graph, where the call in progress can be read."""
        fraction = self.set_mode_by_call_(module, inputs[0])
        return None if fraction is None else (self.rescale(module, inputs[0], current_call().num_parts or 1, fraction),)

    def trace(self, module: _BatchNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Do the same in a form that can be traced; :func:`prepare_traced_call` has set the mode of the layer."""
        call, x = self.traced, inputs[0]
        fraction: float | Tensor | None = 1 if module.running_mean is None else call.fraction
        if fraction == 1:
            _check_count(x, x.numel(), call.num_parts)
        if fraction == 0 or (fraction == 1 and call.num_parts is None):
            return None
        # The compiler fuses this with the layer.
        return (self.rescale(module, x, call.num_parts or 1, call.blend if fraction is None else fraction), *inputs[1:])

    def choose_fraction(self, module: _BatchNorm, num_images: int) -> float:
        """Return the fraction of the batch for a call on this many images."""
        if module.running_mean is None:
            return 1.0
        if (fraction := current_call().fraction) is not None:
            return fraction
        return automatic_fraction(num_images, self.fraction) if isinstance(self.fraction, str) else self.fraction

    @staticmethod
    def set_mode_(module: _BatchNorm, by_layer: bool) -> None:
        """Let the layer compute batch statistics, tracking nothing, or let it read its running statistics."""
        if module.training is not by_layer or module.track_running_stats is by_layer:  # which torch sets slowly
            module.training = by_layer
            module.track_running_stats = not by_layer

    @classmethod
    def use_and_return_statistics_(cls, module: _BatchNorm, x: Tensor, fraction: float | None) -> tuple[Tensor, Tensor]:
        """Let the layer normalize this call by statistics that are returned, the same as without; for no gradients."""
        assert module.running_mean is not None and module.running_var is not None, "checked by the caller"
        variance, mean = (each.flatten() for each in batch_var_mean(x.detach().to(module.running_mean.dtype)))
        part = float(module.training) if fraction is None else fraction
        mean, variance = module.running_mean.lerp(mean, part), module.running_var.lerp(variance, part)
        cls.set_mode_(module, by_layer=False)
        vars(module).update(running_mean=mean, running_var=variance)
        return mean, variance

    @staticmethod
    def blend_(module: _BatchNorm, inputs: tuple[Tensor, ...], fraction: float) -> tuple[Tensor, ...] | None:
        """Let the layer normalize this call by blended statistics; :func:`unmask_running_statistics` ends it."""
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        x = inputs[0]
        values = x.to(module.running_mean.dtype)
        blended = blend_with_batch(module.running_mean, module.running_var, values.detach(), fraction)
        # Attributes of the instance hide the buffers of the same names, which keep the running statistics: whatever
        # interrupts the call, they are what is saved and copied.
        vars(module).update(running_mean=blended.mean, running_var=blended.variance)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return None
        return (carry_blended_gradient(x, blended, module.eps), *inputs[1:])

    @staticmethod
    def rescale(module: _BatchNorm, x: Tensor, num_parts: int, fraction: float | Tensor) -> Tensor:
        """Return x shifted and scaled so that normalizing by the running statistics gives the blended normalization."""
        assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
        along_channels = (-1,) + (1,) * (x.ndim - 2)
        mean, variance = module.running_mean.view(along_channels), module.running_var.view(along_channels)
        values = x.to(mean.dtype).unflatten(0, (num_parts, -1))
        axes = [axis for axis in range(values.ndim) if axis not in (0, 2)]
        batch = LocalReducer() if torch.compiler.is_compiling() else current_reducer()
        batch_variance, batch_mean = batch.var_mean(values, axes)
        blended = mean.lerp(batch_mean, fraction), variance.lerp(batch_variance, fraction)
        return fix_stride_of_one(renormalize(module, values, *blended, x.ndim - 2).flatten(0, 1)).to(x.dtype)


def _check_count(x: Tensor, num_values: int, num_parts: int | None) -> None:
    """Raise an InputError if each channel of each part has a single value."""
    if num_values == x.shape[1] * (num_parts or 1):
        raise InputError(
            f"batch statistics need more than one value per channel, and a BatchNorm got {tuple(x.shape)}: "
            "give larger batches, or blend in the source's statistics with for example batch_stats=0.1"
        )


def prepare_traced_call(net: nn.Module, x: Tensor) -> None:
    """Let a compiled network treat its next call, on these inputs, as the call in progress says."""
    num_parts = current_call().num_parts
    num_images = current_call().num_images or len(x) // (num_parts or 1)
    call: TracedCall | None = None
    for module in net.modules():
        if isinstance(module, _BatchNorm) and (hook := _find_hook(module)) is not None:
            fraction = hook.choose_fraction(module, num_images)
            hook.set_mode_(module, by_layer=fraction == 1 and num_parts is None)
            unmask_running_statistics(module)
            if call is None and module.running_mean is not None:
                call = hook.traced
                call.is_prepared = True
                call.num_parts, call.fraction = num_parts, int(fraction) if fraction in (0, 1) else None
                if call.fraction is None:
                    call.blend = torch.tensor(fraction, dtype=module.running_mean.dtype, device=x.device)


def unmask_running_statistics(module: nn.Module) -> None:
    """Let the running statistics of a BatchNorm be seen again that others have hidden for one call."""
    if torch.compiler.is_compiling():
        return  # none are hidden in a compiled call
    vars(module).pop("running_mean", None)
    vars(module).pop("running_var", None)


def renormalize(module: _BatchNorm, values: Tensor, mean: Tensor, variance: Tensor, num_spatial: int) -> Tensor:
    """Shift and scale values so that the layer, with its running statistics, normalizes them by other ones.

    Exact, differentiable with respect to the statistics, and independent of how the layer computes its output.

    Args:
        module: The layer.
        values: Its input (..., C, spatial axes), in the dtype of its statistics.
        mean: The mean to normalize by; broadcasts with the values.
        variance: The variance to normalize by.
        num_spatial: The number of axes after the channels.
    """
    assert module.running_mean is not None and module.running_var is not None, "checked when the method is built"
    along_channels = (-1,) + (1,) * num_spatial
    running_mean, running_var = module.running_mean.view(along_channels), module.running_var.view(along_channels)
    scale = ((running_var + module.eps) / (variance + module.eps)).sqrt()
    return torch.addcmul(running_mean - mean * scale, values, scale)


def use_batch_statistics_(net: nn.Module, fraction: BatchStats) -> None:
    """Let every BatchNorm normalize by (1-fraction) * running + fraction * batch statistics.

    With ``"auto"`` and ``"blend"``, a network of which a layer keeps no running statistics uses the batch's only.
    """
    if isinstance(fraction, str) and not has_running_statistics(net):
        fraction = 1.0
    traced = TracedCall()
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm):
            if not isinstance(fraction, str) and fraction < 1 and module.running_mean is None:
                raise ConfigError(
                    f"batch_stats={fraction} blends running with batch statistics, and layer '{name}' keeps no running "
                    "statistics; use batch_stats=1"
                )
            BatchStatistics.set_mode_(module, by_layer=fraction == 1)
            BatchStatistics(fraction, traced=traced).attach_(module)


def use_running_statistics_(net: nn.Module) -> None:
    """Undo :func:`use_batch_statistics_`: let every BatchNorm use its running statistics, where it keeps any."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            remove_hooks_(module, lambda _, hook: isinstance(hook, BatchStatistics))
            unmask_running_statistics(module)
            module.training, module.track_running_stats = False, module.running_mean is not None


def uses_batch_statistics(net: nn.Module) -> bool:
    """Return whether the prediction for one input depends on the others of its batch."""
    return any(
        isinstance(module, _BatchNorm) and (module.running_mean is None or _find_hook(module) is not None)
        for module in net.modules()
    )


def batch_fraction(net: nn.Module, num_images: int) -> float:
    """Return the fraction of the batch in the network's BatchNorm statistics for a call on this many images.

    It is 0 for a network without BatchNorm.
    """
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            return (_find_hook(module) or BatchStatistics(0.0)).choose_fraction(module, num_images)
    return 0.0


def has_batch_norm(net: nn.Module) -> bool:
    """Return whether a network has a BatchNorm."""
    return any(isinstance(module, _BatchNorm) for module in net.modules())


def blends_automatically(net: nn.Module) -> bool:
    """Return whether the number of images decides how the network's BatchNorms blend their statistics."""
    first = next((module for module in net.modules() if isinstance(module, _BatchNorm)), None)
    hook = None if first is None else _find_hook(first)
    return hook is not None and isinstance(hook.fraction, str)


def _find_hook(module: _BatchNorm) -> BatchStatistics | None:
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, BatchStatistics)), None)
