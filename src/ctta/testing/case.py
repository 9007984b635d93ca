"""What every check works with: a method on a network, and comparisons of answers and of states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.checkpoint.encoding import is_storable

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """A method on a network; everything it makes is the same at each call."""

    method: type[AdaptiveModel]
    build: Build
    hyperparameters: dict[str, Any]

    def net(self) -> nn.Module:
        """The network with the same weights each time, and running statistics that are not the initial ones."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            net = self.build()
            for name, buffer in net.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
        return net.eval()

    def model(self, net: nn.Module | None = None) -> AdaptiveModel:
        return self.method(self.net() if net is None else net, **self.hyperparameters)

    def not_storable(self) -> dict[str, Any]:
        """The hyperparameters that a file cannot hold, to give again on loading."""
        return {name: value for name, value in self.hyperparameters.items() if not is_storable(value)}

    def batch(self, number: int, size: int = 6) -> Tensor:
        return torch.rand(size, 3, 16, 16, generator=torch.Generator().manual_seed(number))

    def stream(self, count: int = 3) -> list[Tensor]:
        return [self.batch(number) for number in range(count)]


#: Every check by its name.
CHECKS: dict[str, Callable[[Case], None]] = {}


def contract(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """Enter a check into CHECKS under its own name."""
    CHECKS[check.__name__] = check
    return check


def run(model: AdaptiveModel, stream: list[Tensor]) -> list[Tensor]:
    return [model(x) for x in stream]


def assert_same(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    assert len(ours) == len(theirs), what
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"{what}: differ at batch {number} by {(one - other).abs().max():.3g}"


def state_of(model: nn.Module) -> list[Tensor]:
    """Return the state of a stream: weights, buffers, optimizer state and all integers, declared or not."""
    integers = [torch.tensor(value) for part in _streams_in(model) for _, value in sorted(integers_of(part).items())]
    return tensors_of(model) + integers


def integers_of(model: AdaptiveModel) -> dict[str, int]:
    """Return the integer attributes of a model; the counters should be the only ones that change."""
    return {name: value for name, value in vars(model).items() if type(value) is int}


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Weights, buffers and optimiser state."""
    tensors = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    for part in _streams_in(model):
        for _, values in sorted(part.optimizer.state_dict()["state"].items()) if part.optimizer else ():
            tensors += [torch.as_tensor(value).clone() for _, value in sorted(values.items())]
    return tensors


def _streams_in(model: nn.Module) -> list[AdaptiveModel]:
    """The model and, where it is around others, those."""
    return [part for part in model.modules() if isinstance(part, AdaptiveModel)]
