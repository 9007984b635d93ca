"""Three small networks of different kinds for CIFAR-10, as a user would have them; trained in minutes.

    python -m benchmarks.train.small_networks --cifar FOLDER --out WEIGHTS

trains all three on one core and writes ``bn.safetensors``, ``group_norm.safetensors`` and ``vit.safetensors``. The
functions below build them with these weights, read from ``$SMALL_NETWORKS`` or the folder ``small_networks`` of the
working directory, for ``--model file:benchmarks/train/small_networks.py:bn``.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.data.cifar10_files import read_split
from benchmarks.train.embedded import PADDING, crop_and_flip, to_input
from ctta.models import Normalized

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCH_SIZE, WEIGHT_DECAY = 128, 0.05


class ConvNet(nn.Module):
    """Four convolutions with residual connections in between, and one kind of norm layer."""

    def __init__(self, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False), make_norm(32), nn.ReLU())
        self.block1 = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), make_norm(32), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), make_norm(64), nn.ReLU())
        self.block2 = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), make_norm(64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, 10)."""
        x = self.stem(x)
        x = x + self.block1(x)
        x = self.down(x)
        x = x + self.block2(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (N, T, D)."""
        query, key, value = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        tokens: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return tokens


class Block(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (N, T, D)."""
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class SmallViT(nn.Module):
    """A vision transformer with a class token, for images of 32x32 in patches of 4x4."""

    def __init__(self, width: int = 64, num_blocks: int = 3, num_heads: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 65, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, 10)."""
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


#: What builds each network, its epochs and its largest learning rate.
RECIPES: dict[str, tuple[Callable[[], nn.Module], int, float]] = {
    "bn": (lambda: ConvNet(nn.BatchNorm2d), 8, 4e-3),
    "group_norm": (lambda: ConvNet(lambda width: nn.GroupNorm(8, width)), 5, 4e-3),
    "vit": (SmallViT, 5, 2e-3),
}


def bn() -> nn.Module:
    """Return the network with BatchNorm, for images in [0, 1]."""
    return Normalized(_load("bn"), CIFAR10_MEAN, CIFAR10_STD)


def group_norm() -> nn.Module:
    """Return the network with GroupNorm, for images in [0, 1]."""
    return Normalized(_load("group_norm"), CIFAR10_MEAN, CIFAR10_STD)


def vit() -> nn.Module:
    """Return the vision transformer, for images in [0, 1]."""
    return Normalized(_load("vit"), CIFAR10_MEAN, CIFAR10_STD)


def vit_without_normalization() -> nn.Module:
    """Return the vision transformer without the normalization that it was trained with: a mistake."""
    return _load("vit")


def bn_with_wrong_normalization() -> nn.Module:
    """Return the network with BatchNorm behind a normalization to [-1, 1], which it was not trained with: a mistake."""
    return Normalized(_load("bn"), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def _load(name: str) -> nn.Module:
    net = RECIPES[name][0]()
    net.load_state_dict(load_file(Path(os.environ.get("SMALL_NETWORKS", "small_networks")) / f"{name}.safetensors"))
    return net


def train(name: str, images: Tensor, labels: Tensor) -> nn.Module:
    """Train a network on uint8 images, normalized by the mean and standard deviation of CIFAR-10."""
    make, num_epochs, peak = RECIPES[name]
    torch.manual_seed(0)
    inner = make()
    net = Normalized(inner, CIFAR10_MEAN, CIFAR10_STD).train()
    padded = F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    optimizer = torch.optim.AdamW(net.parameters(), peak, weight_decay=WEIGHT_DECAY)
    num_steps = len(images) // BATCH_SIZE
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=num_epochs * num_steps, pct_start=0.2)
    for epoch in range(num_epochs):
        started, total = time.perf_counter(), 0.0
        generator = torch.Generator().manual_seed(epoch)
        for chosen in torch.randperm(len(images), generator=generator)[: num_steps * BATCH_SIZE].split(BATCH_SIZE):
            loss = F.cross_entropy(net(to_input(crop_and_flip(padded, chosen, generator))), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        seconds = time.perf_counter() - started
        print(f"{name} {epoch + 1}/{num_epochs}: loss {total / num_steps:.3f}, {seconds:.0f} s", flush=True)
    return inner


def main() -> None:
    """Train the networks that have no weights yet."""
    parser = argparse.ArgumentParser(description="Train three small networks on CIFAR-10.")
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = (torch.from_numpy(part) for part in read_split(arguments.cifar, "train"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in RECIPES:
        if not (path := arguments.out / f"{name}.safetensors").exists():
            save_file(train(name, images, labels).state_dict(), path)


if __name__ == "__main__":
    main()
