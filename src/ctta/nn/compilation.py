"""Networks of a method under ``torch.compile``.

What a call of a network depends on besides its input (the number of images in the batch, how many views it stacks) is
in a context variable, which the compiler cannot trace. A compiled network reads it before the compiled part, and leaves
its content where that part finds it: see :class:`ctta.nn.TracedCall`. Student, teacher and source, and all forks,
have the same structure and share compiled code.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ctta.core.parallel import current_call
from ctta.errors import first_line
from ctta.nn import prepare_traced_call
from ctta.nn.surgery import find_untraceable_hooks


class Compilation:
    """How the networks of a model and of its forks are compiled, or that they are not any more.

    Args:
        options: Keyword arguments of :func:`torch.compile`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.call: Callable[..., Tensor] = torch.compile(_call, **options)
        self.is_given_up = False

    def __deepcopy__(self, memo: object) -> Self:
        """Return the same object: copies of a model give up together."""
        return self

    def apply_(self, *nets: nn.Module) -> None:
        """Compile the networks that are not compiled yet: new ones, and copies, which start uncompiled.

        Args:
            *nets: The networks; nothing is compiled before they are called.
        """
        for net in nets:
            if net._compiled_call_impl is None and not self.is_given_up:
                if hooks := find_untraceable_hooks(net):
                    self.give_up(f"the method needs {', '.join(hooks)} in its layers, which cannot be traced")
                else:
                    net._compiled_call_impl = _CompiledCall(net, self)

    def give_up(self, reason: str) -> None:
        """Run without the compiler from now on, and say so once."""
        if not self.is_given_up:
            self.is_given_up = True
            warnings.warn(f"the networks run without torch.compile: {reason}", stacklevel=2)


class _CompiledCall:
    """What a network runs when it is called, instead of its own ``_call_impl``."""

    def __init__(self, net: nn.Module, compilation: Compilation) -> None:
        self.net, self.compilation = net, compilation

    def __call__(self, *inputs: Tensor) -> Tensor:
        # Rows on other processes need collective operations within the network, and recorded statistics are not traced.
        call = current_call()
        uses_recorded = call.record is not None or call.fixed_statistics is not None
        if self.compilation.is_given_up or call.reducer.is_sharded or uses_recorded:
            return _call(self.net, *inputs)
        prepare_traced_call(self.net, inputs[0])
        try:
            return self.compilation.call(self.net, *inputs)
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException  # here, since importing it takes a second

            if not isinstance(error, TorchDynamoException):
                raise
            logits = _call(self.net, *inputs)  # which raises if the network is what fails
            cause = getattr(error, "inner_exception", error)
            self.compilation.give_up(f"{type(cause).__name__}: {first_line(cause)}")
            return logits


def _call(net: nn.Module, *inputs: Tensor) -> Tensor:
    """Run a network and its hooks; what is compiled."""
    logits: Tensor = net._call_impl(*inputs)
    return logits
