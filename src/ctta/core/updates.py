"""The updates of a method: optimizer, policies around it, counters, random draws, and the record of the last step."""

import hashlib
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ctta.core.networks import MethodNetworks
from ctta.core.options import Precision
from ctta.core.parallel import current_call, current_reducer
from ctta.core.validation import check_integer
from ctta.errors import ConfigError
from ctta.nn import FULL_BATCH_SIZE, BatchStats, batch_fraction, blends_automatically
from ctta.nn.surgery import Output, returns_logits
from ctta.optim import (
    OptimizerFactory,
    Outcome,
    build_optimizer,
    scale_steps,
    sharpness_aware_step_,
    step_if_finite_,
    with_lr,
)


@dataclass(frozen=True)
class Step:
    """What the last update did. The tensors are scalars without a graph.

    Attributes:
        loss: The mean loss of the batch.
        skipped: Whether nothing was updated because the loss or a gradient was not finite.
        confidence: The mean confidence over the batch: the source's if a gate compares it, else the prediction's.
            None if the method does not compute it.
        augmented: The fraction of elements whose target was averaged over views. None if the method has no views.
        selected: The fraction of elements that the method learned from. None if it selects none; 0 if it found nothing
            to learn from, and then nothing was updated.
        entropy: The mean entropy of what was learned from, where it is not that of the predictions; None otherwise.
        batch_stats: The fraction of the batch in BatchNorm's statistics, the rest being the source's; 0 without
            BatchNorm.
        scale: The fraction of the optimizer's step that was taken; below 1 for small batches with
            ``batch_stats="auto"``.
        is_empty: Whether nothing was selected to learn from.
    """

    loss: Tensor
    skipped: bool
    confidence: Tensor | None = None
    augmented: Tensor | None = None
    selected: Tensor | None = None
    entropy: Tensor | None = None
    batch_stats: float = 1.0
    scale: float = 1.0
    is_empty: bool = False

    @property
    def updated(self) -> bool:
        """Whether the weights were updated."""
        return not self.skipped and not self.is_empty


class Policy(ABC):
    """Something that happens around the updates of any method, such as a reset; see :mod:`ctta.policies`.

    A policy holds settings only (make it a frozen dataclass). Its state is the module that :meth:`start` returns, which
    becomes part of the model: saved, reset, forked, moved and undone with it.
    """

    #: Name in files and in ``repr``; a model has one policy of each name.
    name: ClassVar[str]
    #: Whether the student predicts, before the step, whatever the method itself would return.
    student_predicts: ClassVar[bool] = False
    #: Whether the policy draws random numbers, so that results depend on the seed of the model.
    is_random: ClassVar[bool] = False

    def start(self, model: Any) -> nn.Module:
        """Return the initial state: a module with buffers of fixed size.

        Args:
            model: The model, with its networks and its optimizer.

        Returns:
            The state, :class:`torch.nn.Module` without buffers if there is none.

        Raises:
            ConfigError: The policy cannot be used with this model.
        """
        return nn.Module()

    def wants_update(self, model: Any, state: Any, x: Tensor, predict: Callable[[], Tensor]) -> bool:
        """Return whether the method may learn from a batch; otherwise it only predicts. Nothing may change.

        Args:
            model: The model.
            state: The state of this policy.
            x: The batch.
            predict: Returns the predictions, which costs a pass unless the update is skipped.

        Returns:
            Whether the batch may be learned from, as far as this policy is concerned.
        """
        return True

    def before_update(self, model: Any, state: Any, x: Tensor) -> None:
        """Act between the backward pass and the optimizer's step; gradients are finite, and may be changed.

        Args:
            model: The model.
            state: The state of this policy.
            x: The batch.
        """
        return

    def after_step(self, model: Any, state: Any, x: Tensor, logits: Tensor) -> None:
        """Act after a batch was predicted and learned from; ``model.last_step`` tells what happened.

        It is None, and ``model.is_skipping`` is set, if a policy has skipped the update.

        If a policy restarts the model, those after it have nothing left to act on and are not called.

        Args:
            model: The model.
            state: The state of this policy.
            x: The batch.
            logits: The predictions, before any correction for the user.
        """
        return

    @override
    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{self.name}({values})"


class MethodUpdates(MethodNetworks):
    """A method's networks, and the tools that update them: one step of an optimizer, with policies around it.

    Args:
        net: Any network; it is copied and never changed.
        lr: The learning rate, if it should differ from that of the optimizer's factory.
        policies: What happens around the updates, of :mod:`ctta.policies`.
        batch_stats: The fraction of the batch in BatchNorm's statistics, see :class:`ctta.AdaptiveModel`.
        seed: The seed of all random draws.
        output: Where the logits are in the network's output.
        amp: The precision of the networks' passes.
    """

    num_steps: int
    num_skipped: int
    _active_policies: tuple[Policy, ...] = ()
    _is_skipping = False
    # Of the step in progress: the batch, what is returned, what policies judge, and whether one restarted the model.
    _batch: Tensor | None = None
    _returned: Tensor | None = None
    _policy_logits: Tensor | None = None
    _is_restarted = False
    _counter_names: tuple[str, ...] = ()
    _trained_names: tuple[str, ...] = ()

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
        for policy in policies:
            if not isinstance(policy, Policy):
                raise TypeError(f"policies must come from ctta.policies, such as reset_every(1000), got {policy!r}")
        super().__init__(net, batch_stats=batch_stats, output=output, amp=amp)
        self._lr = lr
        self.policies: tuple[Policy, ...] = tuple(policies)
        self.seed = check_integer("seed", seed)
        self.optimizer: Optimizer | None = None
        self.last_step: Step | None = None
        self.register_counter("num_steps")
        self.register_counter("num_skipped")

    # ---- for constructors ----

    def optimize(self, net: nn.Module, factory: OptimizerFactory) -> None:
        """Build the optimizer of :meth:`minimize` for the parameters of a network that require grad.

        Args:
            net: The network to train.
            factory: The hyperparameter ``optimizer``. The hyperparameter ``lr`` replaces its learning rate and becomes
                part of it, so :attr:`hyperparameters` and files have it within ``optimizer``.
        """
        self.optimizer_factory = with_lr(factory, self._lr)
        self.optimizer = build_optimizer(self.optimizer_factory, net)
        # Of a list, such as a network and its projector, the networks: those that predict.
        nets = [part for part in net if returns_logits(part)] if isinstance(net, nn.ModuleList) else [net]
        self._trained_names = tuple(name for name, child in self.named_modules() if any(child is each for each in nets))
        if not self._trained_names:
            raise ConfigError(f"{type(self).__name__} must keep a network as an attribute before optimize() trains it")
        self._start_policies(self.policies)

    @property
    def trained_networks(self) -> list[nn.Module]:
        """What :meth:`optimize` was called with: the networks whose parameters the optimizer trains."""
        return [self.get_submodule(name) for name in self._trained_names]

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

    @property
    def counters(self) -> dict[str, int]:
        """The declared counters and their values."""
        return {name: getattr(self, name) for name in self._counter_names}

    # ---- for steps ----

    def generator(self, purpose: str) -> torch.Generator:
        """Return the random generator of this step for one purpose.

        Args:
            purpose: A name such as ``"views"``; different purposes draw independently.

        Returns:
            A generator on the CPU, seeded by (seed, number of steps, purpose) and nothing else.
        """
        digest = hashlib.blake2b(f"{self.seed}/{self.num_steps}/{purpose}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest))

    @property
    def step_scale(self) -> float:
        """How far the step in progress may go, relative to a step on a full batch.

        Under ``batch_stats="auto"`` or ``"blend"`` a batch of n < 16 images counts for (n/16)² of a step: n/16 because
        it has that share of the images, and again because so few say less about the stream. It is 1 otherwise, and for
        networks without BatchNorm, unless a guard says what a full batch is. :meth:`minimize` applies it; a method that
        updates more than the optimizer does should too.
        """
        full = current_call().full_batch_size or (FULL_BATCH_SIZE if blends_automatically(self.source) else 1)
        return min(1.0, (current_call().num_images or full) / full) ** 2

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
        means = _reduce(loss=loss, confidence=confidence, augmented=augmented, selected=selected, entropy=entropy)
        with scale_steps(self.optimizer, self.step_scale):
            outcome = step_if_finite_(self.optimizer, loss, self._update_hook, means.get("selected"))
        return self._record_step(outcome, means)

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
        means = _reduce(loss=loss, confidence=confidence, selected=selected)

        def compute_reduced_loss() -> tuple[Tensor, Tensor]:
            second_loss, second_selected = compute_second_loss()
            means.update(_reduce(loss=second_loss, selected=second_selected, entropy=second_loss))
            return second_loss, means["selected"]

        optimizer, hook = self.optimizer, self._update_hook
        with scale_steps(optimizer, self.step_scale):
            first = means["selected"]
            outcome = sharpness_aware_step_(optimizer, loss, compute_reduced_loss, radius, hook, first)
        return self._record_step(outcome, means)

    def set_policy_logits(self, logits: Tensor) -> None:
        """Let policies judge these logits, if :meth:`adapt_step` returns corrected ones.

        Args:
            logits: What the network predicted.
        """
        self._policy_logits = logits.detach()

    @property
    def returned_logits(self) -> Tensor:
        """What the step in progress returns (N, C, ...), for :meth:`Policy.after_step`: with a method's corrections."""
        assert self._returned is not None, "the step in progress has predicted"
        return self._returned

    def _record_step(self, outcome: Outcome, means: dict[str, Tensor]) -> bool:
        self.num_skipped += outcome is Outcome.SKIPPED
        fraction = batch_fraction(self.source, current_call().num_images or FULL_BATCH_SIZE)
        self.last_step = Step(
            skipped=outcome is Outcome.SKIPPED,
            **means,
            batch_stats=fraction,
            scale=self.step_scale,
            is_empty=outcome is Outcome.EMPTY,
        )
        return bool(outcome)

    # ---- around a step ----

    def _begin_step(self, x: Tensor) -> None:
        self.last_step = None  # a step without an update leaves no record
        self._batch = x if self._active_policies else None
        self._policy_logits, self._is_restarted = None, False

    def _finish_step(self, x: Tensor, logits: Tensor) -> None:
        self._returned = logits
        logits = logits if self._policy_logits is None else self._policy_logits
        for policy in self._active_policies:
            policy.after_step(self, self.policy_states[policy.name], x, logits)
            if self._is_restarted:
                break
        self._batch = self._returned = self._policy_logits = None
        torch.clear_autocast_cache()  # or a surrounding autocast would keep using the weights before the update
        self.num_steps += 1

    @property
    def _predicting_student(self) -> nn.Module | None:
        """The student, if a policy lets it predict."""
        if not any(policy.student_predicts for policy in self._active_policies):
            return None
        return self.trained_networks[0]

    @property
    def _update_hook(self) -> Callable[[], None] | None:
        """What the policies do between the backward pass and the optimizer's step."""
        has_any = any(type(policy).before_update is not Policy.before_update for policy in self._active_policies)
        return self._run_policies if has_any else None

    def _run_policies(self) -> None:
        assert self._batch is not None, "a step is in progress"
        for policy in self._active_policies:
            policy.before_update(self, self.policy_states[policy.name], self._batch)


def _reduce(**local: Tensor | None) -> dict[str, Tensor]:
    """Return the means over the batch from means, or masks, over the local rows; without those that are None."""
    mean, given = current_reducer().mean, {name: value for name, value in local.items() if value is not None}
    floats = {name: value if value.is_floating_point() else value.float() for name, value in given.items()}
    return {name: mean(value.detach().mean() if value.ndim else value.detach()) for name, value in floats.items()}
