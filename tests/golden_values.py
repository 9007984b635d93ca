"""Logits of every method on four kinds of networks, which hold the numbers of the library fixed.

After a change that is meant to change numbers, regenerate ``tests/golden/methods.safetensors`` with

    python tests/golden_values.py
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ctta

PATH = Path(__file__).parent / "golden" / "methods.safetensors"
NUM_STEPS = 10


def make_features(norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    first = [nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU()]
    return [*first, nn.Conv2d(8, 8, 3, stride=2, padding=1), norm(8), nn.ReLU()]


def make_classifier(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(*make_features(norm), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def make_pixel_net() -> nn.Module:
    return nn.Sequential(*make_features(nn.BatchNorm2d), nn.Conv2d(8, 5, 1))


class AttentionNet(nn.Module):
    """Patches, attention between them, and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, stride=4)
        self.norm_before = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.norm_after = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        normalized = self.norm_before(tokens)
        tokens = tokens + self.attention(normalized, normalized, normalized, need_weights=False)[0]
        logits: Tensor = self.head(self.norm_after(tokens).mean(1))
        return logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "bn": partial(make_classifier, nn.BatchNorm2d),
    "gn": partial(make_classifier, partial(nn.GroupNorm, 2)),
    "ln": AttentionNet,
    "px": make_pixel_net,
}
# The batches are small, and the recorded values are those of the published methods.
BATCH: dict[str, Any] = {"batch_stats": 1.0}
SEED: dict[str, Any] = {"seed": 7, **BATCH}
METHODS: dict[str, Callable[[nn.Module], ctta.AdaptiveModel]] = {
    "source": ctta.Source,
    "bn_stats": partial(ctta.BNStats, **BATCH),
    "pseudo_label": partial(ctta.PseudoLabel, **BATCH),
    "tent": partial(ctta.Tent, **BATCH),
    "tent_blend": partial(ctta.Tent, batch_stats=0.3),
    "test_aug": partial(ctta.TestAug, **SEED),
    "cotta": partial(ctta.CoTTA, **SEED),
    "cotta_paper": partial(ctta.CoTTA.paper, **SEED),
    "cotta_fast": partial(ctta.CoTTA.fast, **SEED),
    "cotta_element": partial(ctta.CoTTA, gate="element", **SEED),
    "cotta_seg": partial(ctta.CoTTA.official_segmentation, seed=7),
    "guarded_tent": lambda net: ctta.Guarded(ctta.Tent(net, **BATCH)),
    "guarded_cotta": lambda net: ctta.Guarded(ctta.CoTTA.fast(net, **SEED)),
}
CASES = [
    f"{method}/{network}" for network in NETWORKS for method in METHODS if method != "cotta_seg" or network == "px"
]


def compute_logits(case: str) -> Tensor:
    """Return the logits of every step, in float64; of dense ones four pixels of each image."""
    method, network = case.split("/")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(list(NETWORKS).index(network))
        net = NETWORKS[network]().double()
    model = METHODS[method](net)
    generator = torch.Generator().manual_seed(11)
    logits = [model(torch.rand(6, 3, 16, 16, generator=generator).double()) for _ in range(NUM_STEPS)]
    return torch.stack(logits)[..., 3::8, 3::8].contiguous() if network == "px" else torch.stack(logits)


if __name__ == "__main__":
    save_file({case: compute_logits(case) for case in CASES}, PATH)
