"""Hold-out images shuffled, sorted by class, and with few classes per batch, for choosing how a guard meets them."""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.data.cifar10_files import read_split
from benchmarks.data.hold_out import FIRST_IMAGE
from ctta.data.corruptions import HOLD_OUT, corrupt

Arrangement = Literal["shuffled", "sorted", "three classes", "imbalanced"]
ARRANGEMENTS: tuple[Arrangement, ...] = get_args(Arrangement)
#: Corruption and severity; None for clean images.
DOMAINS: tuple[tuple[str, int] | None, ...] = (
    None,
    *((name, severity) for name in HOLD_OUT for severity in (2, 5)),
)
NUM_CLASSES, NUM_PER_CLASS = 10, 48


def describe_domain(domain: tuple[str, int] | None) -> str:
    """Return a short name of a domain."""
    return "clean" if domain is None else f"{domain[0]} {domain[1]}"


@cache
def read_images(cifar: Path, domain: tuple[str, int] | None) -> tuple[Tensor, Tensor]:
    """Return CIFAR-10 test images 2,000 to 9,999 in [0, 1], corrupted, and their classes; 960 of them for each domain.

    Each domain has other images.
    """
    images, labels = read_split(cifar, "test")
    rng = np.random.default_rng(DOMAINS.index(domain))
    rows = FIRST_IMAGE + rng.permutation(len(images) - FIRST_IMAGE)[: 2 * NUM_CLASSES * NUM_PER_CLASS]
    pixels = images[rows] if domain is None else corrupt(images[rows], domain[0], domain[1], seed=1)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255).contiguous(), torch.from_numpy(labels[rows])


def arrange(labels: NDArray[np.int64], arrangement: Arrangement, batch_size: int, seed: int = 0) -> NDArray[np.int64]:
    """Return the rows of 480 images in the order of an arrangement."""
    rng = np.random.default_rng(seed)
    count = NUM_CLASSES * NUM_PER_CLASS
    rows = rng.permutation(len(labels))
    if arrangement == "shuffled":
        return rows[:count]
    if arrangement == "sorted":
        return np.concatenate([rows[labels[rows] == label][:NUM_PER_CLASS] for label in range(NUM_CLASSES)])
    if arrangement == "imbalanced":  # half of the images are of one class, in every batch
        one, others = rows[labels[rows] == 3], rows[labels[rows] != 3]
        return rng.permutation(np.concatenate([one, others[: len(one)]]))
    pools = [list(rows[labels[rows] == label]) for label in range(NUM_CLASSES)]
    chosen: list[int] = []
    while len(chosen) < count and sum(map(bool, pools)) >= 3:  # three classes in each batch, others in the next
        classes = rng.choice([label for label, pool in enumerate(pools) if pool], 3, replace=False)
        for label in rng.choice(classes, batch_size):
            if pools[label]:
                chosen.append(int(pools[label].pop()))
    return np.array(chosen[:count])


def iter_rows(
    cifar: Path, domain: tuple[str, int] | None, arrangement: Arrangement, batch_size: int
) -> Iterator[Tensor]:
    """Yield the rows of the images of :func:`read_images` in each batch."""
    _, labels = read_images(cifar, domain)
    yield from torch.from_numpy(arrange(labels.numpy(), arrangement, batch_size)).split(batch_size)


def iter_batches(
    cifar: Path, domain: tuple[str, int] | None, arrangement: Arrangement, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images and their classes."""
    images, labels = read_images(cifar, domain)
    for rows in iter_rows(cifar, domain, arrangement, batch_size):
        yield images[rows], labels[rows]


def add_domain_option(parser: ArgumentParser) -> None:
    """Let a script run on some of the domains, for a quick look."""
    names = [describe_domain(domain) for domain in DOMAINS]
    parser.add_argument("--domains", nargs="+", choices=names, default=names, help="domains to run on; all by default")


def select_domains(names: Sequence[str]) -> list[tuple[str, int] | None]:
    """Return the domains of these names."""
    return [domain for domain in DOMAINS if describe_domain(domain) in names]
