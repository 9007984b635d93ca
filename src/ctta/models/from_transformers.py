"""Networks of transformers, made to take images in [0, 1] and to be pickled after they were called."""

import copy
from typing import Any

from torch import Tensor, nn

from ctta.models.normalized import Normalized


class FromTransformers(Normalized):
    """A network of transformers that normalises its images itself.

    At its first call such a network hangs functions on its layers that hand their outputs on; pickle refuses these, as
    they are defined inside other functions. They stay behind here, and come back at the first call afterwards.
    """

    def forward(self, x: Tensor) -> Any:
        try:
            return super().forward(x)
        except RuntimeError as error:
            if "Kernel size can't be greater than actual input size" not in str(error):
                raise
            raise ValueError(
                f"images of {x.shape[2]}x{x.shape[3]} pixels are too small for {type(self.net).__name__}: give larger "
                "ones, or views that shrink them less, such as views=ctta.views.multiscale_flip((1, 1.5, 2))"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_modules": {"net": _without_capturing_hooks(self.net, {})}}


def _without_capturing_hooks(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    """The same layers around the same tensors, without the hooks and the note that they are there."""
    if id(module) not in done:
        twin = done[id(module)] = copy.copy(module)
        vars(twin).pop("_output_capturing_hooks_installed", None)
        hooks = type(module._forward_hooks)((key, hook) for key, hook in module._forward_hooks.items() if _stays(hook))
        twin._forward_hooks = hooks
        twin._modules = {
            name: None if child is None else _without_capturing_hooks(child, done)
            for name, child in module._modules.items()
        }
    return done[id(module)]


def _stays(hook: Any) -> bool:
    is_theirs = getattr(hook, "__module__", "").startswith("transformers.")
    return not (is_theirs and "<locals>" in hook.__qualname__)
