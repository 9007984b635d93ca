"""Vision transformers: their blocks and attention are found by structure, and REM agrees with a naive one to 1e-10."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive_vit import naive_predict, naive_rem
from test_mathematics import CLOSE, assert_same_run, stream
from test_methods_entropy import NAIVE_OPTIMIZER, OPTIMIZER
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError
from ctta.nn.vit import change_tokens, find_blocks, record_class_attention
from ctta.testing import NETWORKS
from ctta.testing.networks import BlockViT


class EncoderBlock(nn.Module):
    """A block like torchvision's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, tokens: Tensor) -> Tensor:
        normal = self.ln_1(tokens)
        tokens = tokens + self.self_attention(normal, normal, normal, need_weights=False)[0]
        mixed: Tensor = tokens + self.mlp(self.ln_2(tokens))
        return mixed


class EncoderViT(nn.Module):
    """A network with the structure of torchvision's ViT."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(torch.randn(1, 17, width))
        self.encoder.layers = nn.Sequential()
        for number in range(3):
            self.encoder.layers.add_module(f"encoder_layer_{number}", EncoderBlock(width))
        self.encoder.ln = nn.LayerNorm(width)
        self.heads = nn.Sequential(nn.Linear(width, 5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], 1)
        tokens = tokens + self.get_parameter("encoder.pos_embedding")
        encoded = self.get_submodule("encoder.ln")(self.get_submodule("encoder.layers")(tokens))
        logits: Tensor = self.heads(encoded[:, 0])
        return logits


def make_transformers_vit(attention: str = "sdpa") -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(num_hidden_layers=3, image_size=16, patch_size=4, num_labels=5, **sizes)
    config._attn_implementation = attention
    net: nn.Module = transformers.ViTForImageClassification(config).eval()
    return net


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "timm": (BlockViT, "blocks.{}"),
    "torchvision": (EncoderViT, "encoder.layers.encoder_layer_{}"),
    "transformers": (make_transformers_vit, "vit.layers.{}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_found_by_structure(kind: str) -> None:
    make, pattern = KINDS[kind]
    net = make()
    blocks = find_blocks(net)
    assert blocks == tuple(pattern.format(number) for number in range(len(blocks))) and len(blocks) >= 2
    wrapped = nn.Sequential(nn.Identity(), net)
    assert find_blocks(wrapped) == tuple(f"1.{name}" for name in blocks)


def attention_of_eager_transformers(net: nn.Module, x: Tensor) -> Tensor:
    output: Any = net(x, output_attentions=True)
    attention: Tensor = output.attentions[-1]
    return attention[:, :, 0, 1:].mean(1)


def attention_of_torchvision(net: nn.Module, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    layer = net.get_submodule("encoder.layers.encoder_layer_2.self_attention")

    def record(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        handle.remove()
        found.append(module(*inputs, need_weights=True)[1])

    handle = layer.register_forward_hook(record)
    net(x)
    return found[0][:, 0, 1:]


def test_attention_of_the_class_token() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 16, 16)
    eager = make_transformers_vit("eager")
    expected: list[tuple[nn.Module, Tensor]] = [
        (eager, attention_of_eager_transformers(eager, x)),
        (net := EncoderViT().eval(), attention_of_torchvision(net, x)),
        (vit := BlockViT().eval(), torch.tensor([naive_predict(vit, image)[1] for image in x])),
    ]
    for each, attention in expected:
        with record_class_attention(each, find_blocks(each)[-1]) as recorded:
            each(x)
        assert len(recorded) == 1
        torch.testing.assert_close(recorded[0], attention)
        each(x)
        assert len(recorded) == 1  # the hooks are gone


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_can_be_dropped(kind: str) -> None:
    net, x = KINDS[kind][0]().eval(), torch.rand(2, 3, 16, 16)
    first, *_, last = find_blocks(net)
    with change_tokens(net, first, lambda tokens: tokens[:, :5]), record_class_attention(net, last) as recorded:
        net(x)
    assert recorded[0].shape == (2, 4)


class WithRegisters(BlockViT):
    def __init__(self) -> None:
        super().__init__()
        self.reg_token = nn.Parameter(torch.zeros(1, 4, 16))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (NETWORKS["batch_norm"](), "the network has no class token: expected a vision transformer"),
        (NETWORKS["vit"](), "no list of blocks with attention"),
        (WithRegisters(), "it has also reg_token"),
    ],
)
def test_other_networks_are_refused(net: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ctta.REM(net)


def bottom_norms(net: BlockViT) -> list[nn.Parameter]:
    """Return the scales and shifts of the first three of four blocks."""
    layers = [f"blocks.{block}.norm{norm}" for block in range(3) for norm in (1, 2)]
    return [net.get_parameter(f"{layer}.{kind}") for layer in layers for kind in ("weight", "bias")]


def make_small_vit(depth: int = 4) -> BlockViT:
    torch.manual_seed(6)
    net = BlockViT(width=4, patch=2, size=4, depth=depth)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0, 0.6)
    return net.double().eval()


def test_rem() -> None:
    net, batches = make_small_vit(), [x[:2] for x in stream()]
    settings: dict[str, Any] = {"masked": (0.3, 0.6), "ranking": 0.7, "margin": 0.01}
    expected, student = naive_rem(net, batches, parameters=bottom_norms, optimizer=NAIVE_OPTIMIZER, **settings)
    model = ctta.REM(net, optimizer=OPTIMIZER, **settings)
    assert_same_run(model, batches, expected)
    CLOSE([p.detach() for p in model.student.parameters()], [p.detach() for p in student.parameters()])
    assert model.skipped_layers == ("blocks.3", "norm")


@pytest.mark.parametrize("kind", KINDS)
def test_rem_learns_on_every_kind_of_vit(kind: str) -> None:
    net, x = KINDS[kind][0]().eval(), torch.rand(4, 3, 16, 16)
    model = ctta.REM(net)
    torch.testing.assert_close(model(x), model.source(x))
    changed = {
        name
        for name, value in model.student.named_parameters()
        if not torch.equal(value, model.source.get_parameter(name))
    }
    assert changed and all("norm" in name or "ln_" in name for name in changed)
    assert not any(name.startswith(model.skipped_layers) for name in changed)


@pytest.mark.parametrize("masked", [(), (0.2, 0.1)])
def test_rem_needs_ascending_fractions(masked: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        ctta.REM(BlockViT(), masked=masked)
