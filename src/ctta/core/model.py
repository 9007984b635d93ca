"""What users call, and what a method implements."""

import copy
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from threading import get_ident
from typing import Any, ClassVar, Self, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.hyperparameters import (
    document_common_arguments,
    expand_signature,
    format_hyperparameters,
    format_value,
    read_hyperparameters,
)
from ctta.core.networks import MethodNetworks
from ctta.core.options import Precision
from ctta.core.parallel import SINGLE_PROCESS, Coordinator, change_call, current_call, current_reducer, read_flags
from ctta.core.state import allocate_lazy_buffers_, match_dtypes_, release_lazy_buffers_
from ctta.core.updates import MethodUpdates, Policy
from ctta.core.validation import check_choice
from ctta.errors import ConfigError, InputError, annotate_network_error
from ctta.io.html import render_facts
from ctta.nn import BatchStats, estimate_running_statistics_, use_batch_statistics_
from ctta.nn.activations import ActivationPlan, MemoryReduction
from ctta.nn.compilation import Compilation
from ctta.nn.surgery import (
    ExtractLogits,
    Output,
    check_batch,
    check_input_rank,
    copy_sharing_tensors,
    copy_without_hooks,
    explain_memory,
    iter_inputs,
    keep_buffers,
    returns_logits,
    train_only_,
)
from ctta.optim import load_state_
from ctta.views import check_images


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method, for ``ctta methods`` and for tables of results.

    A method declares them as its class attribute ``info``::

        class Tent(AdaptiveModel):
            info = MethodInfo("TENT", paper="Wang et al., ICLR 2021", trains="norm layers", backward_passes=1)

    Attributes:
        title: Name of the method as papers print it; the row of a table.
        paper: Authors, venue and year; empty if there is none.
        trains: What the method changes: ``"nothing"``, ``"norm layers"``, ``"all weights"`` or another short phrase.
        forward_passes: Passes of a batch through a network per step; a text where settings decide, such as
            ``"2 + views"``.
        backward_passes: Backward passes per step.
        num_networks: Copies of the network in memory, the source included.
        needs_source_data: Whether the method needs statistics of source images.
        labels_pixels: Whether the method also adapts networks that label pixels.
        needs_vit: Whether the method adapts vision transformers with a class token only, see :mod:`ctta.nn.vit`.
        starts_random: Whether a new model depends on ``seed``, such as by the first weights of a projector, so that
            results vary with it even without random views.
        is_episodic: Whether every image or batch starts from the source, so that no step lasts.
    """

    title: str
    paper: str = ""
    trains: str = "nothing"
    forward_passes: int | str = 1
    backward_passes: int = 0
    num_networks: int = 1
    needs_source_data: bool = False
    labels_pixels: bool = True
    needs_vit: bool = False
    starts_random: bool = False
    is_episodic: bool = False


#: The thread that is within a call of a model, by the id of the model, with a mark of that call.
_callers: dict[int, tuple[int, object]] = {}


@contextmanager
def _exclusive_call(model: nn.Module) -> Iterator[None]:
    """Raise a RuntimeError if another thread is within this context for the same model."""
    mark = object()
    thread, first_mark = _callers.setdefault(id(model), (get_ident(), mark))
    if thread != get_ident():
        raise RuntimeError(
            "another thread is calling this model, and steps of a stream come one after another: give each thread a "
            "stream of its own (model.fork()), or hold a lock around each call"
        )
    try:
        yield
    finally:
        if first_mark is mark:
            del _callers[id(model)]


class AdaptiveModel(MethodUpdates, ABC):
    """A network that predicts and adapts when it is called.

    The caller's network is copied and never changed. ``source`` is that copy, frozen: the confidence anchor, the
    restore target and the state that :meth:`reset` returns to. A method that learns adds a ``student`` and an
    ``optimizer`` (:meth:`copy_of_source`, :meth:`optimize`), and CoTTA a ``teacher``. Calling any of them returns
    logits.

    Args:
        net: Any network; ``torch.compile`` and data-parallel wrappers are removed.
        lr: The learning rate, if it should differ from that of the method's ``optimizer``; for methods that learn.
        policies: What happens around the updates, of :mod:`ctta.policies`; for methods that learn.
        batch_stats: The fraction m of the batch in BatchNorm's statistics, (1-m) * running + m * batch. The default
            ``"auto"`` is 1 for batches of at least 16 images, as methods are published. Fewer images are blended with
            the source's statistics, see :meth:`batch_fraction`, and take smaller steps. ``"blend"`` does so for
            batches of any size.
        seed: The seed of all random draws, which depend on nothing else but the number of steps.
        output: Where the logits are in the network's output: a key, an index or a function. By default tensors,
            outputs with ``.logits`` and dictionaries with ``out`` or ``logits`` are recognized.
        amp: ``"bf16"`` or ``"fp16"`` to run the networks under ``torch.autocast``, as :meth:`autocast` says. Every
            method takes it, whether its constructor lists it or not.
    """

    #: What tables say about the method; None for a method that does not declare it.
    info: ClassVar[MethodInfo | None] = None
    #: Named settings of the method: ``"fast"`` of the method ``"cotta"`` is the name ``"cotta_fast"``.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: The hyperparameters that hold views, which refuse images that they cannot transform before anything changes.
    view_arguments: ClassVar[tuple[str, ...]] = ("views",)
    #: Hyperparameters that :func:`ctta.testing.check_method` uses unless others are given: few views, small memories.
    check_settings: ClassVar[Mapping[str, Any]] = {}
    #: Whether a step changes nothing before its first :func:`ctta.core.parallel.read_flags`, which then checks the
    #: values of the input too. An accelerator stalls at each read.
    checks_values_late: ClassVar[bool] = False
    #: The processes that compute the stream together; set by :func:`ctta.distributed.data_parallel`.
    coordinator: Coordinator = SINGLE_PROCESS
    #: Whether several processes can compute a stream of this class together.
    supports_data_parallel = True
    #: Whether callers get logits; not if what a step returns is unpacked for them, such as boxes.
    answers_logits: ClassVar[bool] = True
    #: How the networks are compiled; None unless :meth:`compile` was called.
    _compilation: Compilation | None = None
    #: What the trained network keeps for the backward pass; None unless :meth:`reduce_memory` was called.
    _activation_plan: ActivationPlan | None = None
    #: Whether policies that skip updates are not asked.
    _always_updates = False
    #: The model that this one wraps and delegates to; None unless this is a wrapper, such as a guard.
    wrapped: "AdaptiveModel | None"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let constructors create tensors that can be trained, and state where the network is, wherever they run."""
        super().__init_subclass__(**kwargs)
        if "adapt_step" in vars(cls) and "checks_values_late" not in vars(cls):
            cls.checks_values_late = False  # what the base declares is about its own step
        if "__init__" in vars(cls):
            build, signature = torch.inference_mode(False)(vars(cls)["__init__"]), expand_signature(cls, AdaptiveModel)
            # A constructor that does not take it need not know about it; a wrapper has that of its model.
            adds_amp = "amp" not in signature.parameters and cls._take_source is MethodNetworks._take_source
            if adds_amp:
                keyword = inspect.Parameter("amp", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Precision)
                signature = signature.replace(parameters=[*signature.parameters.values(), keyword])

            @wraps(build)
            def build_and_place(self: AdaptiveModel, *args: Any, **kwargs: Any) -> None:
                try:  # or the base would accept a common argument that the method does not take
                    signature.bind(self, *args, **kwargs)
                except TypeError as error:
                    raise TypeError(f"{cls.__name__}() {error}") from None
                if adds_amp:
                    self._amp = kwargs.pop("amp", self._amp)
                build(self, *args, **kwargs)
                if type(self).__init__ is build_and_place:  # and not a constructor that the class extends
                    self._place_state_()

            vars(build_and_place)["__signature__"] = signature
            type.__setattr__(cls, "__init__", build_and_place)
            document_common_arguments(cls)

    def _place_state_(self) -> None:
        """Move what the constructor has built, beside networks, to the device of the network."""
        first = next(chain(self.source.parameters(), self.source.buffers()), None)
        if first is None:
            return
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, buffer.to(first.device))
        for child in self.children():
            is_placed = all(value.device == first.device for value in chain(child.parameters(), child.buffers()))
            # A network may be on several devices, and a model has placed its own state.
            if not is_placed and not returns_logits(child) and not isinstance(child, AdaptiveModel):
                child.to(first.device)

    def __init__(
        self,
        net: nn.Module,
        *,
        lr: float | None = None,
        policies: Sequence[Policy] = (),
        batch_stats: BatchStats = "auto",
        seed: int = 0,
        output: Output = None,
        amp: Precision | None = None,
    ) -> None:
        super().__init__(net, lr=lr, policies=policies, batch_stats=batch_stats, seed=seed, output=output, amp=amp)
        self.wrapped = None
        self.frozen = False

    # ---- for users: a batch ----

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return ``adapt(x)``, or ``predict(x)`` while frozen."""
        return self.predict(x) if self.frozen else self.adapt(x)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict a batch and learn from it.

        Args:
            x: A batch of inputs (N, ...). An empty batch is returned as it is.

        Returns:
            Detached logits (N, C, ...).

        Raises:
            InputError: The batch cannot be processed; nothing has changed.
        """
        last_step = self.last_step

        def adapt_and_count(rows: Tensor) -> Tensor:
            self._begin_step(rows)
            student = self._predicting_student
            prediction: Tensor | None = None if student is None else student(rows).detach()
            logits = self._predict_if_skipping(rows, prediction)
            if logits is None:
                logits = self.adapt_step(rows)
                logits = logits if prediction is None else prediction
            read_flags()
            self._finish_step(rows, logits.detach())
            return logits

        try:
            return self._run(adapt_and_count, x, changes=True)
        except InputError:
            self.last_step, self._batch = last_step, None
            raise

    def _predict_if_skipping(self, x: Tensor, prediction: Tensor | None) -> Tensor | None:
        """Return the prediction for a batch if a policy skips its update, else None."""
        found = [] if prediction is None else [prediction]

        def predict() -> Tensor:
            if not found:
                with keep_buffers(*self._run_networks):
                    found.append(self.predict_step(x).detach())
            return found[0]

        policies = () if self._always_updates else self._active_policies
        wanted = [policy.wants_update(self, self.policy_states[policy.name], x, predict) for policy in policies]
        self._is_skipping = not all(wanted)
        return predict() if self._is_skipping else None

    @property
    def is_skipping(self) -> bool:
        """Whether a policy has skipped the update of the step in progress, or of the last one."""
        return self.unwrapped._is_skipping

    def predict(self, x: Tensor) -> Tensor:
        """Return what ``adapt(x)`` would return, without changing anything.

        Args:
            x: A batch of inputs (N, ...). An empty batch is returned as it is.

        Returns:
            Detached logits (N, C, ...).
        """
        student = self._predicting_student
        return self._run(self.predict_step if student is None else student, x)

    def predict_once(self, x: Tensor) -> Tensor:
        """Return the logits of one pass of the adapted network, without changing anything.

        This is how a stream that does not wait for updates is answered meanwhile: by the network that :meth:`deploy`
        returns, normalized as the method does, without averaging views or whatever else :meth:`predict` does.

        Args:
            x: A batch of inputs (N, ...). An empty batch is returned as it is.

        Returns:
            Detached logits (N, C, ...).
        """
        return self._run(torch.no_grad()(self._forward_once), x)

    def _forward_once(self, x: Tensor) -> Tensor:
        if type(self).deploy is AdaptiveModel.deploy:
            logits: Tensor = self._adapted_network(x)
            return logits
        net = self.deploy()  # what the method adds to the network, such as prompts, is not in its weights
        return ExtractLogits(self.output)(net, (x,), net(x))

    @property
    def _adapted_network(self) -> nn.Module:
        """The teacher, if it predicts, else the student or whatever else is trained, else the source."""
        if self._predicting_student is not None:
            return self._predicting_student
        trained = self.trained_networks[0] if self.trained_networks else self.source
        network: nn.Module = getattr(self, "teacher", getattr(self, "student", trained))
        return network

    @property
    def _fixed_networks(self) -> list[nn.Module]:
        """The networks that a step may call and never changes."""
        return [self.source]

    @property
    def _run_networks(self) -> list[nn.Module]:
        """The networks that a step may call: the source, and those that were copied from it."""
        return [net for net in self.children() if returns_logits(net)]

    def _prepare_networks(self) -> None:
        """Compile networks, or reduce their memory, if asked to; copies of such networks start without it."""
        if self._compilation is not None:
            self._compilation.apply_(*self._run_networks)
        if self._activation_plan is not None:
            for net in self.trained_networks:
                self._activation_plan.apply_(net)

    def _run(self, step: Callable[[Tensor], Tensor], x: Tensor, *, changes: bool = False) -> Tensor:
        """Check a batch and return the logits of a step on it."""
        is_outermost = current_call().num_images is None
        try:
            return self._run_step(step, x, changes=changes)
        except torch.OutOfMemoryError as error:
            if not is_outermost:
                raise
            error.__traceback__ = None  # or its frames would hold what the step has allocated
            raise torch.OutOfMemoryError(self._explain_memory(x, changes=changes)) from error

    def _explain_memory(self, x: Tensor, *, changes: bool) -> str:
        """Return a sentence on a batch that does not fit into the memory, with the size of one that does.

        Copies of the method try a half, a quarter and so on, so that the size leaves room for one more set of weights.
        """
        method = self.unwrapped

        def attempt(rows: Tensor) -> None:
            trial = copy.deepcopy(method, {id(method.source): method.source})
            with change_call(num_images=len(rows)):  # so that the copy does not explain its own failure
                (trial.adapt if changes else trial.predict)(rows)

        hint = "" if self.amp else ", or amp='bf16'"
        is_single = self.coordinator is SINGLE_PROCESS
        return explain_memory(
            x, attempt if is_single else None, hint, f", reduce_memory() where the method learns{hint}"
        )

    def _run_step(self, step: Callable[[Tensor], Tensor], x: Tensor, *, changes: bool) -> Tensor:
        is_late = self.checks_values_late and self.coordinator is SINGLE_PROCESS
        waiting = current_call().waiting_checks  # of a model around this one
        if waiting is None and is_late:
            waiting = []
        with change_call(waiting_checks=waiting), self.coordinator.fail_together():
            self.check_input(x)
            if not is_late:
                read_flags()
        with _exclusive_call(self), self.coordinator.step(self, x) as rows:
            if len(rows) == 0:
                return x
            self._prepare_networks()
            with (
                change_call(
                    num_images=current_reducer().total_count(len(rows)), waiting_checks=waiting if is_late else None
                ),
                # Callers may loop under no_grad or inference_mode, and learning works under neither. Predictions have
                # gradients on as well, because otherwise torch picks attention kernels that round differently.
                torch.inference_mode(False),
                torch.enable_grad(),
                self.autocast(),
                keep_buffers(*self._fixed_networks, *(() if changes else self._run_networks)),
            ):
                try:
                    logits = step(rows.clone() if rows.is_inference() else rows.detach())
                    read_flags()
                except Exception as error:
                    read_flags()  # what fails may be what a value of the input leads to
                    if isinstance(error, RuntimeError | ValueError):
                        check_input_rank(self.source, x, error)
                        annotate_network_error(error, x)
                    raise
            logits = logits.detach()[: len(x)]
            return logits if self.amp is None else logits.to(x.dtype)

    def freeze(self) -> Self:
        """Stop adapting: calls only predict until :meth:`unfreeze`. The mode survives :meth:`reset` and saving."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Adapt again on every call."""
        self.frozen = False
        return self

    @override
    def compile(self, **options: Any) -> Self:  # type: ignore[override]
        """Compile the networks of the model with :func:`torch.compile`; the first steps then take longer.

        Student, teacher, source and all forks share compiled code, and :meth:`reset`, copies and restored models
        stay compiled. Files do not hold it: call it again after :func:`ctta.load`. Results may differ by rounding.
        Where the compiler fails, or the method keeps a state in layers, a warning says so once and the networks run as
        they are; so they do where several processes share a batch.

        Args:
            **options: Keyword arguments of :func:`torch.compile`, such as ``mode="max-autotune"``.

        Returns:
            The model itself.

        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
        >>> from ctta.methods import Tent
        >>> model = Tent(net).compile(backend="eager")
        >>> logits = model(torch.rand(16, 3, 8, 8))    # compiles, predicts and adapts
        """
        if self.unwrapped._activation_plan is not None:
            raise ConfigError("a model whose memory is reduced cannot be compiled: choose one of the two")
        self.unwrapped._compilation = Compilation(options)
        return self

    def reduce_memory(self, kind: MemoryReduction = "checkpoint") -> Self:
        """Keep fewer activations for the backward pass; predictions and gradients stay the same.

        It lasts through :meth:`reset`, forks and copies. Files do not hold it: call it again after :func:`ctta.load`.

        Args:
            kind: ``"checkpoint"`` keeps the inputs of the network's blocks and computes the rest again when it is
                needed, which takes about one more forward pass (gradient checkpointing). ``"frozen"`` is for methods
                that train norm layers only, such as TENT: layers that do not train keep nothing that the trained ones
                do without, so a convolution keeps no input and a ReLU a byte for each value. It takes hardly any time;
                networks without convolutions gain nothing. ``"checkpoint"`` does this too where it applies.

        Returns:
            The model itself.

        Raises:
            ConfigError: The network has no blocks to compute again, the method keeps a state in its layers or, for
                ``"frozen"``, trains other layers, the method does not learn, or the model is compiled.

        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        >>> from ctta.methods import Tent
        >>> model = Tent(net).reduce_memory("frozen")
        >>> logits = model(torch.rand(16, 3, 8, 8))    # predicts and adapts
        """
        check_choice("kind", kind, get_args(MemoryReduction))
        model = self.unwrapped
        if model._compilation is not None:
            raise ConfigError("the memory of a compiled model cannot be reduced: choose one of the two")
        networks = model.trained_networks
        if not networks:
            raise ConfigError(f"{type(model).__name__} trains no network, so it keeps no activations to reduce")
        model._activation_plan = ActivationPlan.make(kind, networks[0])
        return self

    # ---- for users: a stream ----

    def reset(self) -> Self:
        """Return to the state of a new model, including the random draws; networks and optimizer are new objects."""
        kept = {name for name in vars(self) if name in ("training", "frozen") or "hooks" in name}
        self.__dict__.update({name: value for name, value in vars(self.fork()).items() if name not in kept})
        return self

    def fork(self) -> Self:
        """Return a new stream with the same hyperparameters that shares the source weights of this one."""
        net = copy_without_hooks(self.source, keep=self._callers_hooks)
        train_only_(net, self._trainable)
        fresh = type(self)(net, **self.hyperparameters)
        fresh.source, fresh.coordinator = copy_sharing_tensors(self.source), self.coordinator
        fresh._compilation, fresh._activation_plan = self._compilation, self._activation_plan
        match_dtypes_(fresh, self)
        return fresh

    @torch.no_grad()
    def restart_(self) -> None:
        """Return networks, optimizer and buffers to their first values, in place; ``num_steps`` goes on.

        This is what policies reset with: unlike :meth:`reset` it may be called within a step.
        """
        fresh = self.fork()
        initial = fresh.state_dict()
        release_lazy_buffers_(self)
        allocate_lazy_buffers_(self, initial)
        for name, tensor in self.state_dict(keep_vars=True).items():
            if not name.startswith("source."):
                tensor.copy_(initial[name])
        if self.optimizer is not None and fresh.optimizer is not None:
            load_state_(self.optimizer, fresh.optimizer.state_dict())
        for name, value in fresh.counters.items():
            if name not in ("num_steps", "num_skipped"):
                setattr(self, name, value)
        self._is_restarted = True

    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """Return the adapted network as a plain network of the caller's class that no longer adapts.

        Args:
            batches: Inputs, or tuples that start with them, to estimate BatchNorm's running statistics from; the
                network then predicts each image independently. Without them its BatchNorms keep using batch
                statistics as the method did, also after ``eval()``: a prediction depends on the other images of its
                batch, and the ``state_dict`` alone, loaded elsewhere, has the source's statistics.

        Returns:
            A copy with the weights of the teacher, if it predicts, else those that were trained, else the source's.
        """
        net = copy_without_hooks(self._adapted_network, keep=self._callers_hooks)
        train_only_(net, self._trainable)
        if batches is not None:
            estimate_running_statistics_(net, iter_inputs(batches, net))
        elif self.batch_stats != 0:
            use_batch_statistics_(net, self.batch_stats)
        return net

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The constructor's keyword arguments, from the attributes of the same name; ``lr`` is within ``optimizer``."""
        return read_hyperparameters(self)

    @property
    def unwrapped(self) -> "AdaptiveModel":
        """The method inside all wrappers; the model itself if it is not a wrapper."""
        return self if self.wrapped is None else self.wrapped.unwrapped

    # ---- for a method to implement ----

    @abstractmethod
    def adapt_step(self, x: Tensor) -> Tensor:
        """Predict a batch and update the model.

        Args:
            x: A checked, non-empty batch; gradients are enabled.

        Returns:
            Logits (N, C, ...).
        """

    def predict_step(self, x: Tensor) -> Tensor:
        """Return what :meth:`adapt_step` would return. Correct for every method; override it to avoid the copy.

        Args:
            x: A checked, non-empty batch.

        Returns:
            Logits (N, C, ...).
        """
        twin = copy.deepcopy(self, {id(self.source): self.source})
        twin._always_updates = True  # to predict what an update returns, and not to ask again whether there is one
        return twin.adapt(x)

    def anchor_logits(self, x: Tensor) -> Tensor | None:
        """Return what the method would predict for a batch if it had learned nothing, for a guard to compare with.

        The default of None is right for a method whose predictions without learning are those of ``source`` with the
        statistics of ``batch_stats``. Nothing may change.

        Args:
            x: A checked, non-empty batch.

        Returns:
            Logits (N, C, ...), or None.
        """
        return None

    def judged_logits(self, answer: Tensor, x: Tensor) -> Tensor:
        """Return the logits by which a guard judges what a step has returned; the same unless overridden.

        Args:
            answer: What :meth:`adapt_step` or a network returned.
            x: The batch.

        Returns:
            Logits (N, C, ...).
        """
        return answer

    def check_input(self, x: Tensor) -> None:
        """Raise for a batch that the method or its views cannot process, before anything changes.

        Extend it for further conditions.

        Args:
            x: The batch as the caller gave it.

        Raises:
            InputError: The batch has the wrong shape or values.
            TypeError: It is not a floating-point tensor.
        """
        check_batch(x)
        for views in (getattr(self, name, ()) for name in self.view_arguments):
            if views:
                check_images(x, views)

    def on_load(self, path: str | os.PathLike[str]) -> None:
        """React to having been loaded from a file; does nothing unless overridden.

        Args:
            path: The file.
        """

    # ---- nn.Module ----

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the flag of this module only: the modes of its networks are up to the method."""
        self.training = mode
        return self

    @override
    def extra_repr(self) -> str:
        shown = format_hyperparameters(self.hyperparameters)
        return f"{shown}, skipped_layers=({', '.join(self.skipped_layers)})" if self.skipped_layers else shown

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the method, how far it is, and its settings."""
        networks = [net for name, net in self.named_children() if name != "source"] or [self.source]
        sizes = [parameter.numel() for net in networks for parameter in net.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in self.source.parameters())
        facts = {
            "network": type(self.source).__name__,
            "trains": f"{sum(sizes):,} of {total:,} parameters" if self.optimizer is not None else "nothing",
            "steps": f"{self.num_steps}{', frozen' if self.frozen else ''}",
        }
        if (step := self.unwrapped.last_step) is not None:
            facts["last loss"] = f"{float(step.loss):.4g}{', skipped' if step.skipped else ''}"
        settings = {name: format_value(value) for name, value in self.hyperparameters.items()}
        return render_facts(self.info.title if self.info else type(self).__name__, facts | settings)

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.source = copy.deepcopy(self.source)  # a fork may share it, and must not move with this stream
        super()._apply(fn, recurse)
        if self.optimizer is not None:
            load_state_(self.optimizer, self.optimizer.state_dict())  # on the device and dtype of the parameters now
        return self
