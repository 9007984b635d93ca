"""PEA against an independent implementation, and what it does on each kind of vision transformer."""

from typing import Any

import pytest
import torch
from test_mathematics import CLOSE, assert_same_run
from test_vit import KINDS
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from ctta.testing.networks import BlockViT


def make_net(depth: int = 4) -> BlockViT:
    torch.manual_seed(3)
    net = BlockViT(depth=depth).double().eval()
    with torch.no_grad():
        net.patch_embed.weight.mul_(4)  # so that no direction of the tokens is without variance
    return net


def make_images(num_images: int, seed: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_images, 3, 16, 16, generator=generator, dtype=torch.float64) * (1 - shift) + shift


def embed(net: BlockViT, x: Tensor) -> Tensor:
    tokens = net.patch_embed(x).flatten(2).transpose(1, 2)
    return torch.cat([net.cls_token.expand(len(x), -1, -1), tokens], 1) + net.pos_embed


def root(matrix: Tensor, inverse: bool) -> Tensor:
    """Return the square root of a symmetric matrix or of its inverse, by singular values."""
    left, values, _ = torch.linalg.svd(matrix)
    values = values.clamp_min(1e-5) if inverse else values
    found: Tensor = left @ torch.diag(values.sqrt().reciprocal() if inverse else values.sqrt()) @ left.T
    return found


class NaivePEA:
    """The blocks one after the other, with the statistics of each in a dictionary."""

    def __init__(self, net: BlockViT, source: Tensor, group_size: int, num_views: int, max_rise: float) -> None:
        self.net, self.group_size, self.num_views, self.max_rise = net, group_size, num_views, max_rise
        self.known: dict[int, tuple[Tensor, Tensor, float]] = {}
        self.entropy: float | None = None
        self.num_spikes = self.num_resets = self.num_left = 0
        self.sources, tokens = [], embed(net, source)
        for block in net.blocks:
            tokens = block(tokens)
            flat = tokens.flatten(0, 1)
            self.sources.append((flat.mean(0), torch.cov(flat.T, correction=0)))

    def weigh(self, views: list[Tensor]) -> list[float]:
        outputs, distances = [embed(self.net, view) for view in views], []
        for block, (mean, covariance) in zip(self.net.blocks, self.sources, strict=True):
            outputs = [block(each) for each in outputs]
            tokens = torch.cat([each[:, 0] for each in outputs])
            variances = torch.stack([column.var() for column in tokens.T])
            to_mean = (mean - tokens.mean(0)).square().sum().sqrt()
            distances.append(float(to_mean + (covariance.diagonal() - variances).square().sum().sqrt()))
        low, high = min(distances), max(distances)
        return [(each - low) / (high - low) for each in distances]

    def align(self, number: int, tokens: Tensor, weight: float) -> Tensor:
        if weight < 1e-3:
            self.num_left += 1
            return tokens
        flat, eye = tokens.flatten(0, 1), torch.eye(tokens.shape[2], dtype=tokens.dtype)
        mean, covariance = flat.mean(0), torch.cov(flat.T) + 1e-5 * eye
        usual = 0.0
        if number in self.known:
            old_mean, old_covariance, smoothed = self.known[number]
            drift = float((mean - old_mean).abs().mean())
            usual = 0.2 * drift + 0.8 * smoothed
            if usual > 1e-6 and drift > 4 * usual:
                self.num_spikes += 1
            else:
                mean = 0.02 * mean + 0.98 * old_mean
                covariance = 0.02 * covariance + 0.98 * old_covariance
        self.known[number] = (mean, covariance, usual)
        source_mean, source_covariance = self.sources[number]
        aligned = torch.empty_like(tokens)
        for start in range(0, len(mean), self.group_size):
            own = slice(start, start + self.group_size)
            to_source = root((source_covariance + 1e-5 * eye)[own, own], inverse=False)
            change = root(covariance[own, own], inverse=True) @ to_source
            aligned[..., own] = (tokens[..., own] - mean[own]) @ change + source_mean[own]
        return tokens + weight * (aligned - tokens)

    def __call__(self, x: Tensor) -> Tensor:
        center = F.interpolate(x[:, :, 1:15, 1:15], (16, 16), mode="bilinear")
        views = [x, center, x.flip(3)][: self.num_views + 1]
        weights, predictions = self.weigh(views), []
        for view in views:
            tokens = embed(self.net, view)
            for number, block in enumerate(self.net.blocks):
                tokens = self.align(number, block(tokens), weights[number])
            predictions.append(self.net.head(self.net.norm(tokens)[:, 0]))
        logits: Tensor = sum(predictions[1:], predictions[0]) / len(predictions)
        p = logits.softmax(1)
        entropy = float(-(p * p.log()).sum(1).mean())
        if self.entropy is not None and entropy > self.entropy + self.max_rise:
            self.num_resets += 1
            self.known, self.entropy = {}, None
        self.entropy = entropy if self.entropy is None else 0.2 * entropy + 0.8 * self.entropy
        return logits


#: A new domain in the middle, and before it a dark image again and again.
STREAM = [make_images(6, seed, 0.7 if seed in (5, 6) else 0.02 * seed) for seed in range(9)]
STREAM.insert(2, 0.1 * make_images(1, 50).expand(6, -1, -1, -1))


@pytest.mark.parametrize(
    ("group_size", "num_views", "max_rise", "num_resets"), [(768, 2, 1.0, 0), (6, 0, 1.0, 0), (16, 1, 1e-3, 1)]
)
def test_pea(group_size: int, num_views: int, max_rise: float, num_resets: int) -> None:
    net, source = make_net(), make_images(40, 100)
    with torch.no_grad():
        naive = NaivePEA(net, source, group_size, num_views, max_rise)
        expected = [naive(x) for x in STREAM]
    stats = ctta.source_stats(net, source.split(7), blocks=True)
    model = ctta.PEA(net, source_stats=stats, group_size=group_size, num_views=num_views, max_rise=max_rise)
    assert_same_run(model, STREAM, expected)
    assert naive.num_left >= len(STREAM), "the nearest block stays as it is"
    assert naive.num_spikes
    assert bool(naive.num_resets) == bool(num_resets)


def test_statistics_of_blocks_do_not_depend_on_batches() -> None:
    net, source = make_net(), make_images(20, 0)
    one, many = (ctta.source_stats(net, source.split(size), blocks=True) for size in (20, 3))
    for name in ("block_outputs.mean", "block_outputs.covariance"):
        assert len(one.by_name(name)) == 4
        CLOSE(list(one.by_name(name).values()), list(many.by_name(name).values()))


def test_statistics_of_blocks_are_computed_on_request_only() -> None:
    net, source = make_net(), make_images(20, 0)
    stats = ctta.source_stats(net, [source])
    assert not any(name.startswith("block_outputs") for name in stats.names)
    with pytest.raises(ctta.ConfigError, match="blocks=True"):
        ctta.PEA(net, source_stats=stats)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_vit_is_aligned(kind: str) -> None:
    torch.manual_seed(0)
    net = KINDS[kind][0]().eval()
    x = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = ctta.PEA(net, source_stats=ctta.source_stats(net, [x], blocks=True))
    shifted = x * 0.2
    assert (model(shifted) - ctta.Source(net)(shifted)).abs().max() > 1e-4
    assert model.started.any() and not model.started.all()


def test_other_networks_and_settings_are_refused() -> None:
    net: Any = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(ctta.ConfigError, match="vision transformer"):
        ctta.PEA(net)
    with pytest.raises(ctta.ConfigError, match="num_views"):
        ctta.PEA(make_net(), num_views=3)
    with pytest.raises(ctta.ConfigError, match="source_stats"):
        ctta.PEA(make_net())
