"""Another implementation of a method and ours, in turns: the ratio of their times, and the difference of their logits.

    python -m benchmarks.speed.peers FOLDER [--file cotta.py] [--their ap=0.92 ...] [--ours cotta] [--set restore=0 ...]

FOLDER is a checkout of the other one: a file with a class that is built from a network and an optimizer and adapts by
``forward_and_adapt``, as the authors of TENT and CoTTA and many after them write it. If the file has
``configure_model(net)`` and ``collect_params(net)``, they prepare the network. Nothing of it is part of this
repository; docs/results/performance.md says how to get it.

Both adapt copies of the embedded ResNet-20, with the same optimizer, to the same batches. Without a GPU, their calls of
``.cuda()`` leave tensors where they are.
"""

import argparse
import ast
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.measurements import PairedTimes, compare_times
from ctta.core.hyperparameters import parse_hyperparameters
from ctta.core.registry import resolve_method
from ctta.errors import ConfigError
from ctta.io.python_files import import_python_file, siblings_importable, user_file_errors

ENTRY = "forward_and_adapt"


@dataclass(frozen=True)
class LogitDifference:
    """How two models answer one batch.

    Attributes:
        largest: The largest absolute difference of two logits.
        mean: The mean absolute difference.
        agreement: The fraction of images that both give the same class.
    """

    largest: float
    mean: float
    agreement: float

    def __str__(self) -> str:
        return f"largest {self.largest:.2g}, mean {self.mean:.2g}, same class {self.agreement:.1%}"


@dataclass(frozen=True)
class PeerComparison:
    """Another implementation beside ours.

    Attributes:
        times: Our time divided by theirs.
        differences: How the logits differ on each batch, in order; the first is answered before anything is learned.
    """

    times: PairedTimes
    differences: list[LogitDifference]


def find_file(folder: Path, name: str | None = None) -> Path:
    """Return the file of a folder that defines ``forward_and_adapt``."""
    if name is not None:
        if not (file := folder / name).is_file():
            raise ConfigError(f"there is no file {file}")
        return file
    found = [file for file in sorted(folder.rglob("*.py")) if _defines_entry(file)]
    if len(found) != 1:
        names = ", ".join(str(file.relative_to(folder)) for file in found)
        several = f"several files in {folder} define {ENTRY}: {names}; choose one with --file"
        raise ConfigError(several if found else f"no Python file in {folder} defines {ENTRY}")
    return found[0]


def _defines_entry(file: Path) -> bool:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # of Python 2, say
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == ENTRY for node in ast.walk(tree))


def find_class(module: ModuleType) -> type[nn.Module]:
    """Return the class of a file that is built from a network and an optimizer."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
        if "optimizer" in inspect.signature(value).parameters
    ]
    if len(found) != 1:
        names = ", ".join(each.__name__ for each in found) or "none"
        raise ConfigError(f"{module.__file__} must have one network class that takes an optimizer, found {names}")
    return found[0]


def build_peer(module: ModuleType, net: nn.Module, ours: ctta.AdaptiveModel, settings: Iterable[str]) -> nn.Module:
    """Return the other implementation around a network, with the optimizer of ours."""
    peer = find_class(module)
    net = getattr(module, "configure_model", lambda given: given)(net)
    collected = getattr(module, "collect_params", lambda given: list(given.parameters()))(net)
    parameters = collected[0] if isinstance(collected, tuple) else collected
    arguments = parse_hyperparameters(peer, settings)
    return peer(net, ours.optimizer_factory(parameters), **arguments)


@contextmanager
def cuda_if_available() -> Iterator[None]:
    """Let ``.cuda()`` do nothing on a machine without a GPU."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        for owner in (Tensor, nn.Module):
            stack.enter_context(mock.patch.object(owner, "cuda", lambda self, *_args, **_settings: self))
        yield


def compare(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], batches: list[Tensor], *, budget: float
) -> PeerComparison:
    """Let two models adapt to the same batches in turns.

    Args:
        ours: Our model.
        theirs: The other one.
        batches: The batches, which repeat after the last.
        budget: The seconds that the pairs may take, after a first one that is not timed; there are at least three.
    """
    answers: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    streams = {name: itertools.cycle(batches) for name in answers}

    def step(name: str, model: Callable[[Tensor], Tensor]) -> None:
        answers[name].append(model(next(streams[name])).detach())

    def our_step() -> None:
        step("ours", ours)

    def their_step() -> None:
        step("theirs", theirs)

    their_step()
    our_step()
    times = compare_times(our_step, their_step, budget=budget)
    pairs = zip(answers["ours"], answers["theirs"], strict=True)
    return PeerComparison(times, [_subtract(mine, other) for mine, other in pairs])


def _subtract(mine: Tensor, other: Tensor) -> LogitDifference:
    distance = (mine - other).abs()
    same = mine.argmax(1) == other.argmax(1)
    return LogitDifference(distance.max().item(), distance.mean().item(), same.double().mean().item())


def run(
    folder: Path,
    *,
    file: str | None = None,
    their: Iterable[str] = (),
    ours: str | None = None,
    settings: Iterable[str] = (),
    batch_size: int = 200,
    budget: float = 120.0,
) -> PeerComparison:
    """Compare the implementation in a folder with ours on one corruption of the images that come with the library.

    Args:
        folder: The checkout.
        file: The file of the implementation within it; None to look for it.
        their: Arguments of their class, each ``NAME=VALUE``.
        ours: The name of our method; None for that of their class in lower case.
        settings: Settings of our method, each ``NAME=VALUE``.
        batch_size: The number of images in a batch.
        budget: The seconds for the pairs.
    """
    path = find_file(folder, file)
    with siblings_importable(path), cuda_if_available(), open(os.devnull, "w") as nowhere:
        with user_file_errors(path), redirect_stdout(nowhere):
            module = import_python_file(path)
        method = resolve_method(ours or find_class(module).__name__.lower())
        model = method.build(ctta.models.embedded(), **method.parse(settings))
        with user_file_errors(path), redirect_stdout(nowhere):
            peer = build_peer(module, ctta.models.embedded(), model, their)
            images, _ = ctta.data.datasets.sample().domain("gaussian_noise", 5).read(np.arange(10 * batch_size) % 2000)
            return compare(model, peer, list(images.split(batch_size)), budget=budget)


def main() -> None:
    parser = argparse.ArgumentParser(description="Another implementation of a method and ours, in turns.")
    parser.add_argument("folder", type=Path, help="checkout of the other implementation")
    parser.add_argument("--file", help="its file, relative to the folder; by default the one with forward_and_adapt")
    parser.add_argument("--their", action="append", default=[], metavar="NAME=VALUE", help="argument of their class")
    parser.add_argument("--ours", help="our method; by default the name of their class")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of our method")
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for the pairs, of which there are three")
    given: Any = parser.parse_args()
    torch.set_num_threads(1)  # for the time that the process computes
    try:
        found = run(
            given.folder,
            file=given.file,
            their=given.their,
            ours=given.ours,
            settings=given.set,
            batch_size=given.batch_size,
            budget=given.budget,
        )
    except ConfigError as error:
        sys.exit(str(error))
    times, differences = found.times, found.differences
    print(f"our step / theirs: {times.ratio:.3f}, 95 % interval {times.low:.3f} to {times.high:.3f}")
    print(f"ours: {1000 * times.ours / given.batch_size:.2f} ms per image, {len(differences) - 1} pairs")
    print(f"logits of batch 1: {differences[0]}")
    print(f"logits of batch {len(differences)}: {differences[-1]}")


if __name__ == "__main__":
    main()
