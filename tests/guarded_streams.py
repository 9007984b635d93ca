"""A small trained network, batches of colored images, and guarded methods on them."""

import functools
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ctta
from ctta.guard import Guarded

NUM_CLASSES = 4
WRONG_RATE = 30.0


@functools.cache
def trained_network() -> nn.Module:
    """Return a small network that knows four colors, so that its predictions mean something."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, NUM_CLASSES),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in range(60):
        x, y = make_images(64, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def make_images(count: int, seed: int, classes: list[int] | None = None, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return noisy images of one of four colors, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(NUM_CLASSES, (count,), generator=generator)
    if classes is not None:
        y = torch.tensor(classes)[y % len(classes)]
    colors = torch.tensor([[0.8, 0.2, 0.2], [0.2, 0.8, 0.2], [0.2, 0.2, 0.8], [0.7, 0.7, 0.2]])
    return (colors[y][:, :, None, None] + noise * torch.randn(count, 3, 8, 8, generator=generator)).clamp(0, 1), y


def make_batches(count: int, size: int = 32) -> list[Tensor]:
    return [make_images(size, 1000 + number)[0] for number in range(count)]


def make_batch() -> Tensor:
    return make_batches(1)[0]


def make_tent(source: nn.Module, lr: float = 1e-3) -> ctta.Tent:
    return ctta.Tent(source, optimizer=partial(torch.optim.Adam, lr=lr))


def collapse(source: nn.Module, **settings: Any) -> tuple[Guarded, int]:
    """Return a guarded method whose learning rate is wrong from the first step on, and the batches until the alarm."""
    model = Guarded(make_tent(source, WRONG_RATE), **settings)
    for number, x in enumerate(make_batches(30)):
        model(x)
        if model.events:
            return model, number
    raise AssertionError("no alarm")


def load_guarded(path: Path, source: nn.Module, **given: Any) -> Guarded:
    model = ctta.load(path, source, **given)
    assert isinstance(model, Guarded)
    return model


def event_kinds(model: Guarded) -> list[str]:
    return [event.kind for event in model.events]


def student_weights(model: ctta.AdaptiveModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.get_submodule("student").parameters()]


def flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))
