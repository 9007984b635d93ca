"""The contract that every method keeps.

A method subclasses :class:`AdaptiveModel`, stores its hyperparameters under their own names and writes
:meth:`~AdaptiveModel.adapt_step`. Checks, modes, randomness, reset, fork, moving between devices and saving then work
by themselves, thanks to one rule: *state lives only in submodules, persistent buffers of fixed size, the optimizer and
counters declared with* :meth:`~AdaptiveModel.register_counter`.
"""

import copy
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctta.hyperparameters import format_hyperparameters, read_hyperparameters
from ctta.norms import estimate_running_statistics_, use_batch_statistics_
from ctta.optim import OptimizerFactory, build_optimizer, load_state_, step_if_finite_
from ctta.parallel import SINGLE_PROCESS, Coordinator, current_reducer
from ctta.surgery import Output, copy_for_adaptation, copy_without_hooks, iter_inputs, train_only_
from ctta.validation import check_batch, check_fraction, translate_rank_errors, validate_batches


@dataclass(frozen=True)
class Step:
    """What the last update did; a figure that the method has no use for is None. Nothing here holds a graph."""

    loss: Tensor
    skipped: bool  # the loss or a gradient was not finite, so nothing was updated
    confidence: Tensor | None = None  # mean over the batch: the source's where a gate asks it, else the answer's
    augmented: Tensor | None = None  # share of the elements whose target was averaged over views


class AdaptiveModel(nn.Module, ABC):
    """A network that predicts and adapts when it is called.

    The caller's network is copied and never touched. ``source`` is that copy, frozen: at once the confidence anchor,
    the restore target and what ``reset`` goes back to. A method that learns adds a ``student`` and an ``optimizer``
    (:meth:`copy_of_source`, :meth:`optimize`), and CoTTA a ``teacher``. Their calls return logits.

    Args:
        net: any network; compiled and data-parallel wrappers are taken off.
        batch_stats: share m of the batch in BatchNorm's statistics, (1-m) * running + m * batch.
        seed: with the number of steps so far, all that the randomness of a step depends on.
        output: where the logits are in what the network returns: a key, an index or a function; found by itself
            in tensors, in anything with ``.logits`` and in dicts with ``out`` or ``logits``.
    """

    coordinator: Coordinator = (
        SINGLE_PROCESS  # with whom the stream is computed; ctta.distributed.data_parallel changes it
    )

    supports_data_parallel = True  # whether several processes can compute a stream of this class together
    wrapped: "AdaptiveModel | None"  # the model that this one wraps and delegates to; None unless this is a wrapper
    num_steps: int
    num_skipped: int
    _counter_names: tuple[str, ...] = ()

    def __init__(self, net: nn.Module, *, batch_stats: float = 1.0, seed: int = 0, output: Output = None) -> None:
        if not isinstance(net, nn.Module) or isinstance(net, AdaptiveModel):
            raise TypeError(f"expected a network (torch.nn.Module) that does not adapt yet, got {type(net).__name__}")
        check_fraction("batch_stats", batch_stats)
        super().__init__()
        if not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        self._batch_stats, self._output, self.seed = batch_stats, output, seed
        self.source = copy_for_adaptation(net, batch_stats=batch_stats, output=output)
        self._trainable = {name for name, parameter in self.source.named_parameters() if parameter.requires_grad}
        self.source.requires_grad_(False)
        self.wrapped = None
        self.optimizer: Optimizer | None = None
        self.last_step: Step | None = None
        self.frozen = False
        self.register_counter("num_steps")
        self.register_counter("num_skipped")

    # ---- for users ----

    def forward(self, x: Tensor) -> Tensor:
        """``adapt(x)``, or ``predict(x)`` while frozen."""
        return self.predict(x) if self.frozen else self.adapt(x)

    def adapt(self, x: Tensor) -> Tensor:
        """Logits for x, and an update for the batches to come. An empty batch comes back as it is."""
        with self.coordinator.fail_together():
            self.check_input(x)
        with self.coordinator.step(self, x) as rows:
            if len(rows) == 0:
                return x
            # Callers rightly loop under no_grad or inference_mode; learning works under neither.
            with translate_rank_errors(self.source, x), torch.inference_mode(False), torch.enable_grad():
                logits = self.adapt_step(rows.clone() if rows.is_inference() else rows.detach())
            torch.clear_autocast_cache()  # or a caller's autocast would go on with the weights from before the update
            self.num_steps += 1
        return logits.detach()[: len(x)]

    def predict(self, x: Tensor) -> Tensor:
        """What ``adapt(x)`` would return, changing and advancing nothing."""
        with self.coordinator.fail_together():
            self.check_input(x)
        with self.coordinator.step(self, x) as rows:
            if len(rows) == 0:
                return x
            # With gradients on, as in adapt: without, torch picks other attention kernels, which round differently.
            with translate_rank_errors(self.source, x), torch.inference_mode(False), torch.enable_grad():
                logits = self.predict_step(rows.clone() if rows.is_inference() else rows.detach())
        return logits.detach()[: len(x)]

    def freeze(self) -> Self:
        """Only predict, until ``unfreeze()``. A mode, not state: ``reset`` keeps it, and so does a saved file."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Adapt again."""
        self.frozen = False
        return self

    def reset(self) -> Self:
        """Forget the stream: exactly as new, down to the random draws to come; networks and optimiser are new ones."""
        kept = {name for name in vars(self) if name in ("training", "frozen") or "hooks" in name}
        self.__dict__.update({name: value for name, value in vars(self.fork()).items() if name not in kept})
        return self

    def fork(self) -> Self:
        """A fresh stream with the same hyperparameters that shares this one's source weights."""
        fresh = type(self)(self.copy_of_source(), **self.hyperparameters)
        fresh.source, fresh.coordinator = self.source, self.coordinator
        # What a method has beside its networks was built on the default device and dtype; bring it where this one is.
        for name, buffer in self.named_buffers(recurse=False):
            setattr(fresh, name, getattr(fresh, name).to(buffer))
        for name, module in self.named_children():
            if name not in ("source", "student", "teacher") and (tensors := list(module.state_dict().values())):
                fresh.get_submodule(name).to(tensors[0])
        return fresh

    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """The adapted network as a plain one of the caller's class, which no longer adapts.

        Its weights are the teacher's where there is one, else the student's. With ``batches`` (inputs, or tuples that
        start with them) BatchNorm's running statistics are estimated anew on these, and the network answers each
        image by itself. Without, its BatchNorms stay on the batch statistics that the method used, also after
        ``eval()``: an answer then depends on the other images of its batch, and its ``state_dict`` alone, loaded
        elsewhere, answers by the source's statistics.
        """
        net = copy_without_hooks(getattr(self, "teacher", getattr(self, "student", self.source)))
        train_only_(net, self._trainable)
        if batches is not None:
            estimate_running_statistics_(net, validate_batches(iter_inputs(batches)))
        elif self.batch_stats > 0:
            use_batch_statistics_(net, self.batch_stats)
        return net

    # ---- for a method to write ----

    @abstractmethod
    def adapt_step(self, x: Tensor) -> Tensor:
        """Predict a checked, non-empty batch and update; gradients are on."""

    def predict_step(self, x: Tensor) -> Tensor:
        """What ``adapt_step`` would return: right for every method as it is; override it for a cheaper way."""
        return copy.deepcopy(self, {id(self.source): self.source}).adapt(x)

    def check_input(self, x: Tensor) -> None:
        """Refuse a batch before anything changes; a method with further wishes extends this."""
        check_batch(x)

    # ---- for a method to build on ----

    @torch.inference_mode(False)
    def copy_of_source(self) -> nn.Module:
        """A network to adapt; what was trainable in the caller's network is so in it."""
        net = copy.deepcopy(self.source)
        train_only_(net, self._trainable)
        return net

    def optimize(self, net: nn.Module, factory: OptimizerFactory) -> None:
        """Have :meth:`minimize` train what requires grad in this network."""
        self.optimizer, self.optimizer_factory = build_optimizer(factory, net), factory

    def minimize(self, loss: Tensor, *, confidence: Tensor | None = None, augmented: Tensor | None = None) -> bool:
        """One optimiser step, noted in ``last_step``; False, and no step, if the loss or a gradient is not finite.

        The loss and the figures are means over the elements that ``adapt_step`` was given.
        """
        assert self.optimizer is not None, "a method that learns calls optimize() in its constructor"
        finite = step_if_finite_(self.optimizer, loss)
        self.num_skipped += not finite
        mean = current_reducer().mean
        confidence, augmented = (None if figure is None else mean(figure) for figure in (confidence, augmented))
        self.last_step = Step(mean(loss.detach()), not finite, confidence, augmented)
        return finite

    def register_counter(self, name: str) -> None:
        """Declare an integer attribute that is state, and set it to 0.

        Only declared counters are saved, compared between processes and kept by a rollback. They are read and written
        as plain attributes.

        Args:
            name: the attribute, such as ``"num_seen"``.
        """
        if not name.isidentifier():
            raise ValueError(f"a counter needs the name of an attribute, such as 'num_seen', got {name!r}")
        if hasattr(self, name):
            raise ValueError(f"{type(self).__name__} already has an attribute {name!r}; give the counter another name")
        self._counter_names = (*self._counter_names, name)
        setattr(self, name, 0)

    @property
    def counters(self) -> dict[str, int]:
        """The declared counters and their values."""
        return {name: getattr(self, name) for name in self._counter_names}

    @property
    def unwrapped(self) -> "AdaptiveModel":
        """The method itself, inside all wrappers; the model itself if it is not a wrapper."""
        return self if self.wrapped is None else self.wrapped.unwrapped

    def on_load(self, path: str | os.PathLike[str]) -> None:
        """Do what is due once the model was loaded from a file; a hook for subclasses.

        Args:
            path: The file.
        """

    def generator(self, purpose: str) -> torch.Generator:
        """The random draws of this step for one purpose: a function of (seed, number of steps, purpose) only."""
        digest = hashlib.blake2b(f"{self.seed}/{self.num_steps}/{purpose}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest))

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The constructor's keyword arguments, read back from the attributes of the same name."""
        return read_hyperparameters(self)

    @property
    def batch_stats(self) -> float:
        """Fixed once built, since it is part of how source, student and teacher are made."""
        return self._batch_stats

    @property
    def output(self) -> Output:
        """Fixed once built, like ``batch_stats``."""
        return self._output

    # ---- nn.Module ----

    def train(self, mode: bool = True) -> Self:
        """Set this module's flag only: the modes of the networks inside belong to the method."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        return format_hyperparameters(self.hyperparameters)

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.source = copy.deepcopy(self.source)  # a fork may share it, and must not move with this stream
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            load_state_(self.optimizer, self.optimizer.state_dict())  # on the device and dtype of the parameters now
        return self
