"""The contract that every method keeps.

A method subclasses :class:`AdaptiveModel`, stores its hyperparameters under their own names and implements
:meth:`~AdaptiveModel.adapt_step`. Checks, modes, randomness, reset, fork, saving and moving between devices come from
the base class, on one condition: *state lives only in submodules, persistent buffers of fixed size, the optimizer and
counters declared with* :meth:`~AdaptiveModel.register_counter`. :func:`ctta.testing.check_method` verifies it.
"""

import copy
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ctta.errors import ConfigError, annotate_network_errors
from ctta.heads import count_classes, find_head, record_features_
from ctta.hyperparameters import format_hyperparameters, read_hyperparameters
from ctta.method_info import MethodInfo
from ctta.norms import (
    FULL_BATCH_SIZE,
    BatchStats,
    batch_fraction,
    blends_automatically,
    count_images,
    estimate_running_statistics_,
    find_norm_parameters,
    images_in_batch,
    use_batch_statistics_,
)
from ctta.optim import (
    OptimizerFactory,
    build_optimizer,
    load_state_,
    scale_steps,
    sharpness_aware_step_,
    step_if_finite_,
    with_lr,
)
from ctta.parallel import SINGLE_PROCESS, Coordinator, current_reducer
from ctta.source_stats import SourceStats
from ctta.state import release_lazy_buffers_
from ctta.steps import Policy, Step
from ctta.surgery import (
    Output,
    copy_for_adaptation,
    copy_sharing_tensors,
    copy_without_hooks,
    find_top_layers,
    iter_inputs,
    names_outside,
    train_only_,
)
from ctta.validation import (
    check_batch,
    check_batch_stats,
    check_integer,
    check_output,
    translate_rank_errors,
    validate_batches,
)


class AdaptiveModel(nn.Module, ABC):
    """A network that predicts and adapts when it is called.

    The caller's network is copied and never changed. ``source`` is that copy, frozen: the confidence anchor, the
    restore target and the state that :meth:`reset` returns to. A method that learns adds a ``student`` and an
    ``optimizer`` (:meth:`copy_of_source`, :meth:`optimize`), and CoTTA a ``teacher``. Calling any of them returns
    logits.

    Args:
        net: Any network; ``torch.compile`` and data-parallel wrappers are removed.
        policies: What happens around the updates, of :mod:`ctta.policies`; for methods that learn.
        batch_stats: The fraction m of the batch in BatchNorm's statistics, (1-m) * running + m * batch. The default
            ``"auto"`` is 1 for batches of at least 16 images, as methods are published. Fewer images are blended with
            the source's statistics, see :meth:`batch_fraction`, and take smaller steps. ``"blend"`` does so for
            batches of any size.
        seed: The seed of all random draws, which depend on nothing else but the number of steps.
        output: Where the logits are in the network's output: a key, an index or a function. By default tensors,
            outputs with ``.logits`` and dictionaries with ``out`` or ``logits`` are recognized.
    """

    #: What tables say about the method; None for a method that does not declare it.
    info: ClassVar[MethodInfo | None] = None
    #: Named settings of the method: ``"fast"`` of the method ``"cotta"`` is the name ``"cotta_fast"``.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: The processes that compute the stream together; set by :func:`ctta.distributed.data_parallel`.
    coordinator: Coordinator = SINGLE_PROCESS
    #: Whether several processes can compute a stream of this class together.
    supports_data_parallel = True
    #: The model that this one wraps and delegates to; None unless this is a wrapper, such as a guard.
    wrapped: "AdaptiveModel | None"
    #: Layers nearest to the output that the method does not train although it trains others of their kind.
    skipped_layers: tuple[str, ...] = ()
    num_steps: int
    num_skipped: int
    _active_policies: tuple[Policy, ...] = ()
    _batch: Tensor | None = None
    _counter_names: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the constructors of methods create tensors that can be trained and changed, wherever they are called."""
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            type.__setattr__(cls, "__init__", torch.inference_mode(False)(vars(cls)["__init__"]))

    def __init__(
        self,
        net: nn.Module,
        *,
        policies: Sequence[Policy] = (),
        batch_stats: BatchStats = "auto",
        seed: int = 0,
        output: Output = None,
    ) -> None:
        if not isinstance(net, nn.Module) or isinstance(net, AdaptiveModel):
            raise TypeError(f"expected a network (torch.nn.Module) that does not adapt yet, got {type(net).__name__}")
        check_batch_stats(batch_stats)
        check_output(output)
        for policy in policies:
            if not isinstance(policy, Policy):
                raise TypeError(f"policies must come from ctta.policies, such as reset_every(1000), got {policy!r}")
        super().__init__()
        self.policies: tuple[Policy, ...] = tuple(policies)
        self._batch_stats, self._output, self.seed = batch_stats, output, check_integer("seed", seed)
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

        def adapt_and_count(rows: Tensor) -> Tensor:
            self.last_step = None  # a step without an update leaves no record
            self._batch = rows if self._active_policies else None
            logits = self.adapt_step(rows)
            for policy in self._active_policies:
                policy.after_step(self, self._policy_state(policy), rows, logits.detach())
            self._batch = None
            torch.clear_autocast_cache()  # or a surrounding autocast would keep using the weights before the update
            self.num_steps += 1
            return logits

        return self._run(adapt_and_count, x)

    def predict(self, x: Tensor) -> Tensor:
        """Return what ``adapt(x)`` would return, without changing anything.

        Args:
            x: A batch of inputs (N, ...). An empty batch is returned as it is.

        Returns:
            Detached logits (N, C, ...).
        """
        return self._run(self.predict_step, x)

    def _run(self, step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Check a batch and return the logits of a step on it."""
        with self.coordinator.fail_together():
            self.check_input(x)
        with self.coordinator.step(self, x) as rows:
            if len(rows) == 0:
                return x
            with (
                count_images(current_reducer().total_count(len(rows))),
                annotate_network_errors(x),
                translate_rank_errors(self.source, x),
                # Callers may loop under no_grad or inference_mode, and learning works under neither. Predictions have
                # gradients on as well, because otherwise torch picks attention kernels that round differently.
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                logits = step(rows.clone() if rows.is_inference() else rows.detach())
            return logits.detach()[: len(x)]

    def freeze(self) -> Self:
        """Stop adapting: calls only predict until :meth:`unfreeze`. The mode survives :meth:`reset` and saving."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Adapt again on every call."""
        self.frozen = False
        return self

    def reset(self) -> Self:
        """Return to the state of a new model, including the random draws; networks and optimizer are new objects."""
        kept = {name for name in vars(self) if name in ("training", "frozen") or "hooks" in name}
        self.__dict__.update({name: value for name, value in vars(self.fork()).items() if name not in kept})
        return self

    def fork(self) -> Self:
        """Return a new stream with the same hyperparameters that shares the source weights of this one."""
        fresh = type(self)(self.copy_of_source(), **self.hyperparameters)
        fresh.source, fresh.coordinator = copy_sharing_tensors(self.source), self.coordinator
        # Buffers and further submodules were built on the default device and dtype: move them to this model's.
        for name, buffer in self.named_buffers(recurse=False):
            setattr(fresh, name, getattr(fresh, name).to(buffer))
        for name, module in self.named_children():
            tensors = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
            if name not in ("source", "student", "teacher") and tensors:
                tensors.sort(key=Tensor.is_floating_point)  # modules can be moved to a floating-point dtype only
                is_float = tensors[-1].is_floating_point()
                fresh.get_submodule(name).to(tensors[-1] if is_float else tensors[-1].device)
        return fresh

    def deploy(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """Return the adapted network as a plain network of the caller's class that no longer adapts.

        Args:
            batches: Inputs, or tuples that start with them, to estimate BatchNorm's running statistics from; the
                network then predicts each image independently. Without them its BatchNorms keep using batch
                statistics as the method did, also after ``eval()``: a prediction depends on the other images of its
                batch, and the ``state_dict`` alone, loaded elsewhere, has the source's statistics.

        Returns:
            A copy with the weights of the teacher, else the student, else the source.
        """
        net = copy_without_hooks(getattr(self, "teacher", getattr(self, "student", self.source)))
        train_only_(net, self._trainable)
        if batches is not None:
            estimate_running_statistics_(net, validate_batches(iter_inputs(batches)))
        elif self.batch_stats != 0:
            use_batch_statistics_(net, self.batch_stats)
        return net

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The constructor's keyword arguments, from the attributes of the same name; ``lr`` is within ``optimizer``."""
        return read_hyperparameters(self)

    @property
    def batch_stats(self) -> BatchStats:
        """The fraction of the batch in BatchNorm's statistics; read-only, because the copies are built with it."""
        return self._batch_stats

    def batch_fraction(self, num_images: int) -> float:
        """Return the fraction of the batch in BatchNorm's statistics for a batch of this size.

        Args:
            num_images: The number of images, over all processes that share the batch.

        Returns:
            ``batch_stats``, or what ``"auto"`` or ``"blend"`` means for this batch; 0 for a network without BatchNorm.
        """
        return batch_fraction(self.source, check_integer("num_images", num_images, 1))

    @property
    def output(self) -> Output:
        """Where the logits are in the network's output; read-only, because the copies are built with it."""
        return self._output

    @property
    def counters(self) -> dict[str, int]:
        """The declared counters and their values."""
        return {name: getattr(self, name) for name in self._counter_names}

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
        return copy.deepcopy(self, {id(self.source): self.source}).adapt(x)

    def check_input(self, x: Tensor) -> None:
        """Raise for a batch that cannot be processed, before anything changes; extend it for further conditions.

        Args:
            x: The batch as the caller gave it.

        Raises:
            InputError: The batch has the wrong shape or values.
            TypeError: It is not a floating-point tensor.
        """
        check_batch(x)

    def on_load(self, path: str | os.PathLike[str]) -> None:
        """React to having been loaded from a file; does nothing unless overridden.

        Args:
            path: The file.
        """

    # ---- for a method to build on ----

    @torch.inference_mode(False)
    def copy_of_source(self) -> nn.Module:
        """Return a copy of the source to adapt, trainable where the caller's network is."""
        net = copy.deepcopy(self.source)
        train_only_(net, self._trainable)
        return net

    def use_head(self, head: str | None = None) -> str:
        """Find the classifier, and let the source and later copies of it record features.

        Call it before :meth:`copy_of_source`; then :func:`ctta.heads.features_and_logits` works on every copy.

        Args:
            head: The hyperparameter ``head``: the name of the classifier, None to look for it.

        Returns:
            The name that was found.

        Raises:
            ConfigError: It was not found, or several layers fit.
        """
        name = find_head(self.source, head)
        record_features_(self.source, name)
        return name

    def require_image_logits(self, logits: Tensor) -> None:
        """Raise if a network labels pixels, for a method that is defined for images only (``info.labels_pixels``).

        Args:
            logits: What the network returned.

        Raises:
            ConfigError: The logits are not (N, C).
        """
        if logits.ndim != 2:
            raise ConfigError(
                f"{type(self).__name__} labels whole images, and the network returned logits of shape "
                f"{tuple(logits.shape)}: expected (N, classes); choose another method for networks that label pixels"
            )

    def count_classes(self, num_classes: int | None = None) -> int:
        """Return the number of classes, for buffers that need it before the first batch.

        Args:
            num_classes: The hyperparameter ``num_classes``: None to take it from the classifier.

        Returns:
            The number.

        Raises:
            ConfigError: The classifier was not found.
        """
        if num_classes is not None:
            return check_integer("num_classes", num_classes, 2)
        try:
            return count_classes(self.source)
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__} needs the number of classes: give num_classes=...") from error

    def train_norms_(self, net: nn.Module, *, skip_top: bool = False) -> None:
        """Let only the scales and shifts of the normalization layers of a copy train.

        Args:
            net: The copy, such as the student.
            skip_top: Whether to leave out the layers nearest to the output, :func:`ctta.surgery.find_top_layers`. They
                are shown by ``repr`` as ``skipped_layers``.
        """
        self.skipped_layers = find_top_layers(net) if skip_top else ()
        train_only_(net, names_outside(find_norm_parameters(net), self.skipped_layers))

    def optimize(self, net: nn.Module, factory: OptimizerFactory, lr: float | None = None) -> None:
        """Build the optimizer of :meth:`minimize` for the parameters of a network that require grad.

        Args:
            net: The network to train.
            factory: The hyperparameter ``optimizer``.
            lr: The hyperparameter ``lr``, which replaces the learning rate of the factory; None keeps it. It becomes
                part of the factory, so :attr:`hyperparameters` and files have it within ``optimizer``.
        """
        self.optimizer_factory = with_lr(factory, lr)
        self.optimizer = build_optimizer(self.optimizer_factory, net)
        self._start_policies(self.policies)

    def use_policies(self, *own: Policy) -> None:
        """Build on policies: these run before the user's. Call it in the constructor after :meth:`optimize`.

        Args:
            *own: The policies that are part of the method, from its hyperparameters.

        Raises:
            ConfigError: The user has given one of the same kind.
        """
        self._start_policies((*own, *self.policies))

    def _start_policies(self, policies: tuple[Policy, ...]) -> None:
        for number, policy in enumerate(policies):
            if policy.name in (other.name for other in policies[:number]):
                raise ConfigError(
                    f"{type(self).__name__} would have two policies {policy.name!r}: give one, or change the setting "
                    "of the method that stands for it"
                )
        self._active_policies = policies
        if policies:
            self.policy_states = nn.ModuleDict({policy.name: policy.start(self) for policy in policies})

    def _policy_state(self, policy: Policy) -> nn.Module:
        return self.policy_states[policy.name]

    def _before_update(self) -> None:
        assert self._batch is not None, "a step is in progress"
        for policy in self._active_policies:
            policy.before_update(self, self._policy_state(policy), self._batch)

    @torch.no_grad()
    def restart_(self) -> None:
        """Return networks, optimizer and buffers to their first values, in place; ``num_steps`` goes on.

        This is what policies reset with: unlike :meth:`reset` it may be called within a step.
        """
        fresh = self.fork()
        initial = fresh.state_dict()
        release_lazy_buffers_(self)
        for name, tensor in self.state_dict(keep_vars=True).items():
            if not name.startswith("source."):
                tensor.copy_(initial[name])
        if self.optimizer is not None and fresh.optimizer is not None:
            load_state_(self.optimizer, fresh.optimizer.state_dict())
        for name, value in fresh.counters.items():
            if name not in ("num_steps", "num_skipped"):
                setattr(self, name, value)

    def use_source_stats(self, stats: SourceStats | None, *names: str) -> SourceStats:
        """Keep a copy of statistics of source images as ``self.source_stats``: part of the model and its checkpoints.

        A method takes them as its hyperparameter ``source_stats``. Loading a checkpoint does not need them again.

        Args:
            stats: The hyperparameter; computed by :func:`ctta.source_stats`.
            *names: What the method needs, such as ``"fisher"``.

        Returns:
            The copy.

        Raises:
            ConfigError: They were not given, or are of another network.
        """
        title = type(self).__name__
        if stats is None:
            raise ConfigError(
                f"{title} needs statistics of source images: ctta.{title}(net, source_stats=ctta.source_stats(net, "
                "batches)), or 'ctta source-stats' on the command line"
            )
        if not isinstance(stats, SourceStats):
            raise TypeError(f"source_stats must come from ctta.source_stats, got {type(stats).__name__}")
        stats.verify(self.source)
        self.source_stats = stats.select(names, title)
        return self.source_stats

    def minimize(
        self,
        loss: Tensor,
        *,
        confidence: Tensor | None = None,
        augmented: Tensor | None = None,
        selected: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> bool:
        """Take one optimizer step, recorded in ``last_step``.

        There is no step if the loss or a gradient is not finite, which counts as skipped, or if nothing was selected.

        Args:
            loss: The mean loss over the batch that :meth:`adapt_step` was given; over a part of it by
                :func:`ctta.functional.masked_mean`.
            confidence: The mean confidence, for the record.
            augmented: The fraction of augmented elements, for the record.
            selected: Which elements the loss is computed from (N, ...), if not from all.
            entropy: The mean entropy of what is learned from, for the record, if it is not that of the predictions.

        Returns:
            Whether the step was taken.
        """
        assert self.optimizer is not None, "a method that learns calls optimize() in its constructor"
        means = self._reduce(loss=loss, confidence=confidence, augmented=augmented, selected=selected, entropy=entropy)
        is_empty = selected is not None and not means["selected"] > 0 and bool(means["loss"].isfinite())
        hook = self._before_update if self._active_policies else None
        with scale_steps(self.optimizer, self.step_scale):
            taken = not is_empty and step_if_finite_(self.optimizer, loss, hook)
        return self._record_step(taken, not taken and not is_empty, means)

    def minimize_sharpness(
        self,
        loss: Tensor,
        compute_second_loss: Callable[[], tuple[Tensor, Tensor]],
        *,
        radius: float,
        selected: Tensor,
        confidence: Tensor | None = None,
    ) -> bool:
        """Take one sharpness-aware step, see :func:`ctta.optim.sharpness_aware_step_`; recorded like :meth:`minimize`.

        Args:
            loss: The loss at the present weights.
            compute_second_loss: Returns the loss at the perturbed weights, and which elements it is computed from. This
                is the recorded loss.
            radius: How far to climb.
            selected: Which elements the first loss is computed from (N, ...). Nothing is updated if there are none, in
                either pass.
            confidence: The mean confidence, for the record.

        Returns:
            Whether the step was taken.
        """
        assert self.optimizer is not None, "a method that learns calls optimize() in its constructor"
        means = self._reduce(loss=loss, confidence=confidence, selected=selected)

        def compute_reduced_loss() -> Tensor | None:
            second_loss, second_selected = compute_second_loss()
            means.update(self._reduce(loss=second_loss, selected=second_selected, entropy=second_loss))
            is_empty = not means["selected"] > 0 and bool(means["loss"].isfinite())
            return None if is_empty else second_loss

        is_empty = not means["selected"] > 0 and bool(means["loss"].isfinite())
        hook = self._before_update if self._active_policies else None
        with scale_steps(self.optimizer, self.step_scale):
            taken = not is_empty and sharpness_aware_step_(self.optimizer, loss, compute_reduced_loss, radius, hook)
        is_empty = is_empty or (not means["selected"] > 0 and bool(means["loss"].isfinite()))
        return self._record_step(taken, not taken and not is_empty, means)

    def _reduce(self, **local: Tensor | None) -> dict[str, Tensor]:
        """Return the means over the batch from means, or masks, over the local rows; without those that are None."""
        mean, given = current_reducer().mean, {name: value for name, value in local.items() if value is not None}
        floats = {name: value if value.is_floating_point() else value.float() for name, value in given.items()}
        return {name: mean(value.detach().mean() if value.ndim else value.detach()) for name, value in floats.items()}

    def _record_step(self, taken: bool, is_skipped: bool, means: dict[str, Tensor]) -> bool:
        self.num_skipped += is_skipped
        fraction = batch_fraction(self.source, images_in_batch() or FULL_BATCH_SIZE)
        self.last_step = Step(skipped=is_skipped, **means, batch_stats=fraction, scale=self.step_scale)
        return taken

    @property
    def step_scale(self) -> float:
        """How far the step in progress may go, relative to a step on a full batch.

        Under ``batch_stats="auto"`` or ``"blend"`` a batch of n < 16 images counts for (n/16)² of a step: n/16 because
        it has that share of the images, and again because so few say less about the stream. It is 1 otherwise, and for
        networks without BatchNorm. :meth:`minimize` applies it; a method that updates more than the optimizer does
        should too.
        """
        num_images = images_in_batch() or FULL_BATCH_SIZE
        return min(1.0, num_images / FULL_BATCH_SIZE) ** 2 if blends_automatically(self.source) else 1.0

    def generator(self, purpose: str) -> torch.Generator:
        """Return the random generator of this step for one purpose.

        Args:
            purpose: A name such as ``"views"``; different purposes draw independently.

        Returns:
            A generator on the CPU, seeded by (seed, number of steps, purpose) and nothing else.
        """
        digest = hashlib.blake2b(f"{self.seed}/{self.num_steps}/{purpose}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest))

    def register_counter(self, name: str) -> None:
        """Declare an integer attribute that is part of the state, and set it to 0.

        Declared counters are saved, compared between processes and kept by a rollback. They are read and written as
        plain attributes: ``self.num_seen += len(x)``.

        Args:
            name: The attribute, such as ``"num_seen"``.

        Raises:
            ConfigError: The name is not an identifier, or already taken.
        """
        if not name.isidentifier():
            raise ConfigError(f"a counter needs the name of an attribute, such as 'num_seen', got {name!r}")
        if hasattr(self, name):
            raise ConfigError(f"{type(self).__name__} already has an attribute {name!r}; give the counter another name")
        self._counter_names = (*self._counter_names, name)
        setattr(self, name, 0)

    # ---- nn.Module ----

    @override
    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer that a step may change in place, also if the model is built under inference mode."""
        if tensor is not None and tensor.is_inference():
            with torch.inference_mode(False):
                tensor = tensor.clone()
        super().register_buffer(name, tensor, persistent)

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the flag of this module only: the modes of its networks are up to the method."""
        self.training = mode
        return self

    @override
    def extra_repr(self) -> str:
        shown = format_hyperparameters(self.hyperparameters)
        return f"{shown}, skipped_layers=({', '.join(self.skipped_layers)})" if self.skipped_layers else shown

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.source = copy.deepcopy(self.source)  # a fork may share it, and must not move with this stream
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            load_state_(self.optimizer, self.optimizer.state_dict())  # on the device and dtype of the parameters now
        return self
