"""The small networks for images (N, 3, 16, 16) that the contract is checked on, one of each kind."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

NUM_CLASSES = 5


def _blocks(norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    first, second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 12, 3, stride=2, padding=1)
    return [first, norm(8), nn.ReLU(), second, norm(12), nn.ReLU()]


def make_batch_norm_net() -> nn.Module:
    """Return a convolutional network with BatchNorm."""
    return nn.Sequential(*_blocks(nn.BatchNorm2d), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, NUM_CLASSES))


def make_group_norm_net() -> nn.Module:
    """Return a convolutional network with GroupNorm."""
    return nn.Sequential(
        *_blocks(partial(nn.GroupNorm, 4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, NUM_CLASSES)
    )


def make_segmentation_net() -> nn.Module:
    """Return a fully convolutional network with BatchNorm; its logits have half the size of the image."""
    return nn.Sequential(*_blocks(nn.BatchNorm2d), nn.Conv2d(12, NUM_CLASSES, 1))


class TinyViT(nn.Module):
    """A vision transformer: LayerNorm throughout, and parameters that are not a layer's weight or bias.

    Args:
        width: The number of features of a token.
        patch: The side of a square patch in pixels.
    """

    def __init__(self, width: int = 16, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, (16 // patch) ** 2 + 1, width) * 0.02)
        self.norm_before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, NUM_CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1) + self.pos_embed
        attended = self.norm_before(tokens)
        tokens = tokens + self.attention(attended, attended, attended, need_weights=False)[0]
        logits: Tensor = self.head((tokens + self.mlp(tokens))[:, 0])
        return logits


class SelfAttention(nn.Module):
    """Attention with one layer for queries, keys and values, as in timm.

    Args:
        width: The number of features of a token.
        num_heads: The number of heads.
    """

    def __init__(self, width: int, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        joint = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*joint)
        projected: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return projected


class ViTBlock(nn.Module):
    """A block of a vision transformer, with LayerNorm before each part.

    Args:
        width: The number of features of a token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), SelfAttention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.norm1(tokens))
        mixed: Tensor = tokens + self.mlp(self.norm2(tokens))
        return mixed


class BlockViT(nn.Module):
    """A vision transformer made of blocks with a class token, as timm's: for methods that change tokens.

    Args:
        width: The number of features of a token.
        patch: The side of a square patch in pixels.
        size: The side of an image in pixels.
        depth: The number of blocks.
    """

    def __init__(self, width: int = 16, patch: int = 4, size: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


#: Factories of the networks by name.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": make_batch_norm_net,
    "group_norm": make_group_norm_net,
    "vit": TinyViT,
    "segmentation": make_segmentation_net,
}

#: The networks for methods that adapt vision transformers made of blocks only.
VISION_TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {"vit": BlockViT}
