"""Methods without a backward pass on networks whose linear layers torch has quantized."""

import warnings
from typing import Any

import pytest
import torch
from test_vit import KINDS
from torch import Tensor, nn

import ctta
from ctta.nn.heads import count_classes, features_and_logits, find_head, head_weight
from ctta.nn.vit import find_blocks
from ctta.testing.networks import BlockViT


def quantize(net: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves quantization to another package
        quantized: nn.Module = torch.ao.quantization.quantize_dynamic(net.eval(), {nn.Linear}, dtype=torch.qint8)
    return quantized


def make_vit() -> BlockViT:
    torch.manual_seed(0)
    return BlockViT()


X = torch.rand(3, 16, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["neo", "t3a", "lame", "foa", "pea"])
def test_a_method_predicts_almost_as_on_the_network_of_floats(name: str) -> None:
    def run(net: nn.Module) -> Tensor:
        needs: dict[str, Any] = (
            {"source_stats": ctta.source_stats(net, [X[0]], blocks=True)} if name in ("foa", "pea") else {}
        )
        model = ctta.adapt(net, name, **needs)
        return torch.cat([model(x) for x in X])

    floats, quantized = run(make_vit()), run(quantize(make_vit()))
    assert not torch.equal(floats, quantized)
    assert (floats - quantized).abs().mean() < 0.1 * floats.std()


def test_what_is_deployed_has_what_was_learned() -> None:
    neo, t3a = (ctta.adapt(quantize(make_vit()), name) for name in ("neo", "t3a"))
    for x in X:
        neo(x), t3a(x)
    assert isinstance(neo, ctta.NEO) and isinstance(t3a, ctta.T3A)
    features, logits = features_and_logits(neo.source, X[0])
    expected = logits - neo.center @ head_weight(neo.source).T
    assert torch.allclose(neo.deploy()(X[0]), expected, atol=1e-6)
    prototypes = t3a._average(t3a.features, t3a.entropies)
    assert torch.allclose(t3a.deploy()(X[0]), features @ prototypes.T, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_classes_and_blocks_are_found(kind: str) -> None:
    make, _ = KINDS[kind]
    net, quantized = make(), quantize(make())
    assert find_head(quantized) == find_head(net) and find_blocks(quantized) == find_blocks(net)
    assert count_classes(quantized) == 5
