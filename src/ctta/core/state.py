"""State of a method beside its networks: buffers that the first batch sizes, and undoing a step that is skipped."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override


class LazyModule(nn.Module):
    """A part of a method's state of which the first batch may decide the size, such as a memory of images.

    Lazy buffers exist from the start, without elements, and have a fixed size once they are allocated. A checkpoint
    restores the size that they had. Subclasses declare them with :meth:`register_lazy_buffer` and give them a value
    with :meth:`allocate_`; everything else about them is as for any buffer. Some buffers may stay on the CPU.
    """

    #: Names of buffers that stay on the CPU wherever the module is moved, since the host decides by them, and an
    #: accelerator stalls when the host reads from it.
    cpu_buffers: tuple[str, ...] = ()
    _shapes: dict[str, tuple[int | EllipsisType | None, ...]]

    def __init__(self) -> None:
        super().__init__()
        self._shapes = {}

    @override
    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and self.stays_on_cpu(name):
            tensor = tensor.cpu()
        super().register_buffer(name, tensor, persistent)

    def stays_on_cpu(self, name: str) -> bool:
        """Return whether a buffer is on the CPU wherever the module is."""
        return name in self.cpu_buffers

    def register_lazy_buffer(
        self, name: str, *shape: int | EllipsisType | None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Declare a buffer.

        Args:
            name: The attribute.
            *shape: The sizes of its axes; None for one that the first batch decides, a final ``...`` for any further
                axes.
            dtype: Its dtype; for floating-point values that of the value allocated counts.
        """
        self._shapes[name] = shape
        device = "cpu" if self.stays_on_cpu(name) else None
        self.register_buffer(name, torch.empty(0, dtype=dtype, device=device))

    @property
    def is_allocated(self) -> bool:
        """Whether every buffer has its size."""
        return all(self.get_buffer(name).numel() > 0 for name in self._shapes)

    def allocate_(self, name: str, value: Tensor) -> None:
        """Give a declared buffer its size and its first value.

        Args:
            name: The attribute.
            value: The buffer from now on.

        Raises:
            ValueError: The value does not have the declared shape.
        """
        if not _matches(tuple(value.shape), self._shapes[name]):
            raise ValueError(f"'{name}' has shape {tuple(value.shape)}, which this state cannot have")
        setattr(self, name, value.cpu() if self.stays_on_cpu(name) else value)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: self.get_buffer(name) for name in self.cpu_buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in kept.items():
            setattr(self, name, value.to(self.get_buffer(name).dtype))
        return self


class CpuState(LazyModule):
    """A small state that stays on the CPU with its dtypes, wherever the model is built, loaded or moved.

    What decides by it needs no read of an accelerator. It may be float64, which some devices lack, and 16 bits are too
    few for its counts.
    """

    @override
    def stays_on_cpu(self, name: str) -> bool:
        return True

    @override
    def allocate_(self, name: str, value: Tensor) -> None:
        super().allocate_(name, value.to(self.get_buffer(name).dtype))

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self


class BufferList(nn.Module):
    """Buffers by their number, such as one for each trained tensor.

    Args:
        tensors: Their first values.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        with torch.inference_mode(False):
            for number, tensor in enumerate(tensors):
                self.register_buffer(str(number), tensor.detach().clone())

    def copy_(self, values: Iterable[Tensor]) -> None:
        """Set every buffer to the value of its number."""
        for buffer, value in zip(self, values, strict=True):
            buffer.copy_(value)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the buffers."""
        return iter(buffer for _, buffer in self.named_buffers())


def allocate_lazy_buffers_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every lazy buffer of a new model the size and dtype that it has among saved tensors.

    Args:
        model: The model.
        tensors: Tensors by their names in the ``state_dict`` of the model.

    Raises:
        ValueError: A tensor does not have the shape, or the kind of numbers, that was declared.
    """
    for prefix, module in model.named_modules():
        for name in module._shapes if isinstance(module, LazyModule) else ():
            saved, buffer = tensors.get(f"{prefix}.{name}" if prefix else name), module.get_buffer(name)
            if saved is None:
                continue
            if saved.is_floating_point() != buffer.is_floating_point():
                raise ValueError(f"'{name}' is of type {saved.dtype}, which this state cannot have")
            if saved.shape == (0,):
                if not isinstance(module, CpuState):
                    setattr(module, name, torch.empty_like(saved, device=buffer.device))
            else:
                module.allocate_(name, torch.zeros_like(saved, device=buffer.device))


def release_lazy_buffers_(model: nn.Module) -> None:
    """Let the next batch decide the size of every lazy buffer anew.

    Args:
        model: The model.
    """
    for module in model.modules():
        for name in module._shapes if isinstance(module, LazyModule) else ():
            setattr(module, name, module.get_buffer(name).new_empty(0))


@torch.no_grad()
def match_dtypes_(model: nn.Module, other: nn.Module) -> None:
    """Give the parameters and buffers of a model the floating-point dtypes that those of its names have in another."""
    dtypes = {name: value.dtype for name, value in (*other.named_parameters(), *other.named_buffers())}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and value.dtype != dtypes.get(name, value.dtype):
            value.data = value.data.to(dtypes[name])


def _matches(shape: tuple[int, ...], declared: tuple[int | EllipsisType | None, ...]) -> bool:
    if declared and declared[-1] is ...:
        declared = declared[:-1]
        shape = shape[: len(declared)] if len(shape) >= len(declared) else ()
    return len(shape) == len(declared) and all(
        size > 0 if expected is None else size == expected for size, expected in zip(shape, declared, strict=True)
    )


def snapshot_buffers(*modules: nn.Module) -> Callable[[], None]:
    """Copy the buffers of modules: their running statistics, memories and the like.

    Args:
        *modules: The modules.

    Returns:
        A function that brings every buffer back, bit for bit; also one that has been replaced by another tensor.
    """
    found = [
        (module, name, buffer, buffer.clone())
        for root in modules
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]

    @torch.no_grad()
    def restore() -> None:
        for module, name, buffer, value in found:
            buffer.copy_(value)
            module._buffers[name] = buffer

    return restore
