"""Adapt within ``trainer.predict`` of Lightning; needs the extra ``lightning``."""

from operator import attrgetter
from typing import Any

from torch import nn
from typing_extensions import override

from ctta.core.model import AdaptiveModel
from ctta.core.registry import DEFAULT_METHOD, adapt
from ctta.errors import ConfigError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise ImportError("the callback needs the extra 'lightning': pip install 'ctta[lightning]'") from missing


class AdaptCallback(Callback):  # type: ignore[misc]  # mypy does not read Lightning
    """Lets the network of a LightningModule adapt while ``trainer.predict`` runs.

    The network is replaced when predicting starts, and put back when it ends, whatever happens in between. A second
    ``trainer.predict`` resumes the stream where the first one stopped::

        callback = AdaptCallback("net", "tent", lr=1e-4)
        predictions = Trainer(callbacks=[callback]).predict(module, loader)
        ctta.save(callback.model, "camera7.safetensors")

    Args:
        network: Name of the attribute that holds the network, such as ``"net"`` or ``"encoder.net"``; ``predict_step``
            of the module must call it with a batch of images.
        method: A name for :func:`ctta.adapt`, or a model that was built around the network before, such as by
            :func:`ctta.load`.
        **hyperparameters: Keyword arguments of the method.

    Attributes:
        model: The adaptive model, once predicting has started; None before.
    """

    model: AdaptiveModel | None

    def __init__(self, network: str, method: str | AdaptiveModel | None = None, **hyperparameters: Any) -> None:
        if isinstance(method, AdaptiveModel) and hyperparameters:
            raise ConfigError(f"{type(method).__name__} is built already: give {', '.join(hyperparameters)} to it")
        self.network = network
        self.model = method if isinstance(method, AdaptiveModel) else None
        self._method = method if isinstance(method, str) else None
        self._hyperparameters = hyperparameters
        self._replaced: nn.Module | None = None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the network of the module by the adaptive model."""
        owner, name = self._find_owner(pl_module)
        found = getattr(owner, name, None)
        if not isinstance(found, nn.Module):
            kind = type(pl_module).__name__
            raise ConfigError(f"{kind} has no network {self.network!r}: name the attribute that predict_step calls")
        if self.model is None:
            self.model = adapt(found, self._method or DEFAULT_METHOD, **self._hyperparameters)
        self._replaced = found
        setattr(owner, name, self.model.to(pl_module.device))

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the network back."""
        self._restore(pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the network back, also if predicting fails."""
        self._restore(pl_module)

    def _restore(self, module: LightningModule) -> None:
        if self._replaced is not None:
            owner, name = self._find_owner(module)
            setattr(owner, name, self._replaced)
            self._replaced = None

    def _find_owner(self, module: LightningModule) -> tuple[Any, str]:
        path, _, name = self.network.rpartition(".")
        return (attrgetter(path)(module) if path else module), name
