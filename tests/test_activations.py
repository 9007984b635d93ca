"""Fewer activations for the backward pass: the same predictions and weights, less memory, and nothing counted twice."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from benchmarks.speed.measurements import peak_bytes
from ctta.core.parallel import change_call
from ctta.nn.activations import iter_blocks
from ctta.nn.surgery import copy_for_adaptation
from ctta.testing.networks import BlockViT
from ctta.views import image_views


class NoisyBlock(nn.Module):
    """A block that draws random numbers also in eval mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.num_calls = nn.Linear(width, width), nn.LayerNorm(width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + F.dropout(self.linear(self.norm(x)), 0.5, training=True)


def make_noisy_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), *[NoisyBlock(8) for _ in range(3)], nn.Linear(8, 5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-20": ctta.models.embedded,
    "ResNet-20, contiguous": lambda: ctta.models.embedded().to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
    "ViT": lambda: BlockViT(size=8, depth=3),
    "noisy": make_noisy_net,
}


def draw_images(number: int = 16) -> Tensor:
    return torch.rand(number, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def run_steps(model: ctta.AdaptiveModel, num_steps: int = 3) -> list[Tensor]:
    """Return the logits and the state after some steps, and the next number of torch's own generator."""
    torch.manual_seed(0)
    logits = [model(draw_images()) for _ in range(num_steps)]
    return [*logits, *(value for value in model.state_dict().values() if isinstance(value, Tensor)), torch.rand(1)]


@pytest.mark.parametrize("kind", ["checkpoint", "frozen"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_of_a_method_that_trains_norms_are_the_same(name: str, kind: Any) -> None:
    """To the last bit: the same operations, and random numbers drawn once."""
    torch.manual_seed(1)
    net = NETWORKS[name]()
    expected = run_steps(ctta.adapt(net, "tent"))
    for value, wanted in zip(run_steps(ctta.adapt(net, "tent", reduce_memory=kind)), expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("method", ["cotta", "sar", "palm", "roid", "rem"])
def test_steps_of_other_methods_are_the_same(method: str) -> None:
    """All weights trained, two backward passes, several passes before one, and tokens changed by hooks of a block."""
    torch.manual_seed(1)
    net = BlockViT(size=8, depth=3) if method == "rem" else ctta.models.embedded()
    settings: dict[str, Any] = {"views": image_views(1)} if method == "cotta" else {}
    expected = run_steps(ctta.adapt(net, method, **settings))
    found = run_steps(ctta.adapt(net, method, reduce_memory="checkpoint", **settings))
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("batch_stats", [1.0, "auto", 0.3])
def test_statistics_are_those_of_the_forward_pass(batch_stats: Any) -> None:
    """Also if the backward pass is outside of the context that chose them."""
    net, x = ctta.models.embedded(), draw_images(8)
    model = ctta.Tent(net, batch_stats=batch_stats)
    reduced = copy.deepcopy(model).reduce_memory()
    gradients = []
    for each in (model, reduced):
        each._prepare_networks()
        with change_call(num_parts=2), change_call(num_images=4):
            loss = each.student(x).square().mean()
        loss.backward()
        gradients.append([parameter.grad for parameter in each.student.parameters()])
    for found, wanted in zip(*gradients, strict=True):
        assert (found is None and wanted is None) or torch.equal(found, wanted)


def test_a_block_runs_twice_and_the_last_one_once() -> None:
    model = ctta.Tent(make_noisy_net()).reduce_memory()
    model(draw_images())
    blocks = [module for module in model.student.modules() if isinstance(module, NoisyBlock)]
    assert [block.num_calls for block in blocks] == [2, 2, 1]
    model.predict(draw_images())
    assert [block.num_calls for block in blocks] == [3, 3, 2]


@pytest.mark.parametrize(("kind", "limit"), [("checkpoint", 0.5), ("frozen", 0.75)])
def test_the_peak_is_lower(kind: Any, limit: float) -> None:
    x = draw_images(64)
    plain, reduced = ctta.Tent(ctta.models.embedded()), ctta.Tent(ctta.models.embedded()).reduce_memory(kind)
    peaks = []
    for model in (plain, reduced):
        model(x)
        peaks.append(peak_bytes(partial(model, x)))
    assert peaks[1] < limit * peaks[0]


def test_it_survives_reset_forks_copies_and_rollbacks() -> None:
    x, model = draw_images(), ctta.Tent(make_noisy_net()).reduce_memory()
    guarded = ctta.Guarded(ctta.Tent(make_noisy_net())).reduce_memory()
    guarded(x)
    for each in (model.fork(), copy.deepcopy(model), model.reset(), guarded.rollback().wrapped):
        blocks = [block for block in each.get_submodule("student").modules() if isinstance(block, NoisyBlock)]
        before = [block.num_calls for block in blocks]
        each(x)
        assert [block.num_calls - count for block, count in zip(blocks, before, strict=True)] == [2, 2, 1]


def test_all_kinds_of_relu_and_convolutions() -> None:
    """In place or not, as functions and methods; a trained convolution keeps its input."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.same, self.grouped = nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, 2, 1, 1, 2)
            self.line, self.head = nn.Conv1d(4, 4, 3, dilation=2), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(self.first(x)) * 2, inplace=True)
            x = torch.relu(self.same(x) - 0.1)
            x = self.grouped(x).relu()
            x = torch.relu_(self.line(x.flatten(2)).clone())
            logits: Tensor = self.head(x[:, :, :2].reshape(len(x), -1).relu_())
            return logits

    torch.manual_seed(0)
    net = Net()
    expected = run_steps(ctta.Tent(net))
    found = run_steps(ctta.Tent(net).reduce_memory("frozen"))
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_autocast_learns_the_same() -> None:
    net = ctta.models.embedded()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run_steps(ctta.Tent(net), 2)
        found = run_steps(ctta.Tent(net).reduce_memory("checkpoint"), 2)
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


def test_blocks_are_found_by_structure() -> None:
    assert len(list(iter_blocks(ctta.models.embedded()))) == 9
    assert list(iter_blocks(BlockViT(depth=2))) == ["blocks.0", "blocks.1"]
    assert list(iter_blocks(copy_for_adaptation(nn.Sequential(nn.Linear(2, 2)), batch_stats=0.0, output=None))) == []


def test_what_cannot_be_reduced_is_refused() -> None:
    net, flat = ctta.models.embedded(), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(flat).reduce_memory()
    with pytest.raises(ctta.ConfigError):
        ctta.adapt(net, "note", reduce_memory="checkpoint")
    with pytest.raises(ctta.ConfigError):
        ctta.adapt(net, "cotta", reduce_memory="frozen")
    with pytest.raises(ctta.ConfigError):
        ctta.BNStats(net).reduce_memory()
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(net).compile(backend="eager").reduce_memory()
    with pytest.raises(ctta.ConfigError, match="cannot be compiled"):
        ctta.Tent(net).reduce_memory().compile(backend="eager")
    with pytest.raises(ctta.ConfigError):
        ctta.Tent(net).reduce_memory("all")  # type: ignore[arg-type]
