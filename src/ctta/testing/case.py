"""The subject of a check, a method on a network, and comparisons of logits and states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ctta.checkpoint.encoding import is_serializable
from ctta.core.model import AdaptiveModel
from ctta.source_stats import source_stats

#: Steps over which memory must not grow: on one network a long stream, for what a method stores rarely; on the
#: others as many as show what it keeps of every step.
LONG_STREAM, SHORT_STREAM = 200, 40


@dataclass(frozen=True)
class ContractCase:
    """A method on a network; every call of a ``make_...`` method returns an equal object.

    Attributes:
        method: The class to check.
        network_factory: Builds a network for images (N, 3, 16, 16).
        hyperparameters: Keyword arguments of the method.
        num_steps: The number of steps over which the memory of a stream must not grow.
    """

    method: type[AdaptiveModel]
    network_factory: Callable[[], nn.Module]
    hyperparameters: dict[str, Any]
    num_steps: int = LONG_STREAM

    def make_network(self) -> nn.Module:
        """Return the network, with running statistics that differ from their initial values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            net = self.network_factory()
            for name, buffer in net.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
        return net.eval()

    def make_model(self, net: nn.Module | None = None) -> AdaptiveModel:
        """Return a new model.

        Args:
            net: The network to wrap; by default :meth:`make_network`'s.

        Returns:
            The method with the hyperparameters of the case.
        """
        net = self.make_network() if net is None else net
        return self.method(net, **self.make_source_stats(net), **self.hyperparameters)

    def make_source_stats(self, net: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Return the hyperparameter ``source_stats`` for a method that needs it.

        Args:
            net: The network.
            dtype: That of the network's inputs.

        Returns:
            Statistics of random images, or nothing for other methods.
        """
        info = self.method.info
        if info is None or not info.needs_source_data or "source_stats" in self.hyperparameters:
            return {}
        batches = [self.make_batch(number).to(dtype) for number in (-1, -2)]
        return {"source_stats": source_stats(net, batches, blocks=info.needs_vit)}

    def make_batch(self, number: int, size: int = 6) -> Tensor:
        """Return a batch of random images in [0, 1].

        Args:
            number: The seed of the batch.
            size: The number of images.

        Returns:
            Images (size, 3, 16, 16).
        """
        return torch.rand(size, 3, 16, 16, generator=torch.Generator().manual_seed(number))

    def make_stream(self, num_batches: int = 3) -> list[Tensor]:
        """Return the first batches of a stream.

        Args:
            num_batches: The length of the stream.

        Returns:
            The batches 0, 1, ... of :meth:`make_batch`.
        """
        return [self.make_batch(number) for number in range(num_batches)]

    @cached_property
    def expected_logits(self) -> list[Tensor]:
        """What a new model returns on :meth:`make_stream`, for checks that compare with it."""
        return run_stream(self.make_model(), self.make_stream())

    def unserializable_arguments(self) -> dict[str, Any]:
        """Return the hyperparameters that a checkpoint cannot hold and ``ctta.load`` must be given again."""
        return {name: value for name, value in self.hyperparameters.items() if not is_serializable(value)}


#: Every check of the contract by its name.
CHECKS: dict[str, Callable[[ContractCase], None]] = {}


def register_check(check: Callable[[ContractCase], None]) -> Callable[[ContractCase], None]:
    """Add a check to :data:`CHECKS` under its own name."""
    CHECKS[check.__name__] = check
    return check


def run_stream(model: AdaptiveModel, stream: list[Tensor]) -> list[Tensor]:
    """Return the logits of every batch, adapting along the way."""
    return [model(x) for x in stream]


@contextmanager
def count_optimizer_steps(model: AdaptiveModel) -> Iterator[list[None]]:
    """Yield a list that grows by one entry per step that an optimizer of the model takes within the block."""
    steps: list[None] = []
    optimizers = [part.optimizer for part in _adaptive_models(model) if part.optimizer is not None]
    hooks = [optimizer.register_step_post_hook(lambda *_: steps.append(None)) for optimizer in optimizers]
    try:
        yield steps
    finally:
        for hook in hooks:
            hook.remove()


def count_learned_batches(case: ContractCase) -> int | None:
    """Return after how many batches of the stream the trained weights had changed; None for a method without optimizer.

    Weights are compared, not calls counted: a step with a learning rate or gradient of zero teaches nothing. The steps
    of an episodic method do not last, so that its own record of them counts.
    """
    model = case.make_model()
    if not any(part.optimizer for part in _adaptive_models(model)):
        return None
    num_changed = 0
    for x in case.make_stream():
        before = _trained_weights(model)
        model(x)
        if case.method.info is not None and case.method.info.is_episodic:
            num_changed += model.last_step is not None and model.last_step.updated
        else:
            num_changed += any(not torch.equal(*pair) for pair in zip(before, _trained_weights(model), strict=True))
    return num_changed


def _trained_weights(model: AdaptiveModel) -> list[Tensor]:
    """Return copies of the weights that the optimizers hold."""
    groups = [group for part in _adaptive_models(model) if part.optimizer for group in part.optimizer.param_groups]
    return [parameter.detach().clone() for group in groups for parameter in group["params"]]


def assert_equal(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Raise an AssertionError that starts with ``what`` unless both lists are equal bit for bit."""
    assert len(actual) == len(expected), f"{what}: {len(actual)} tensors, expected {len(expected)}"
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(one, other), f"{what}: tensor {index} differs by up to {(one - other).abs().max():.3g}"


def collect_state(model: nn.Module) -> list[Tensor]:
    """Return copies of the state of a stream: tensors, and all integer attributes, declared as counters or not."""
    integers = [value for part in _adaptive_models(model) for _, value in sorted(integer_attributes(part).items())]
    return collect_tensors(model) + [torch.tensor(value) for value in integers]


def collect_tensors(model: nn.Module) -> list[Tensor]:
    """Return copies of the weights, buffers and optimizer state."""
    tensors = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    for part in _adaptive_models(model):
        for _, values in sorted(part.optimizer.state_dict()["state"].items()) if part.optimizer else ():
            tensors += [torch.as_tensor(value).clone() for _, value in sorted(values.items())]
    return tensors


def integer_attributes(model: AdaptiveModel) -> dict[str, int]:
    """Return the integer attributes of a model, of which only the counters may change."""
    return {name: value for name, value in vars(model).items() if type(value) is int}


def _adaptive_models(model: nn.Module) -> list[AdaptiveModel]:
    """Return the model itself and those that it wraps."""
    return [part for part in model.modules() if isinstance(part, AdaptiveModel)]
