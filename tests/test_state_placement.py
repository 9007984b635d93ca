"""Where the state of a method is: on the device of its network, whoever builds it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.core.state import CpuState
from ctta.testing.networks import BlockViT


def make_network(cls: type[ctta.AdaptiveModel]) -> nn.Module:
    torch.manual_seed(0)
    if cls.info is not None and cls.info.needs_vit:
        return BlockViT(size=8)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return nn.Sequential(*layers)


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, but those that stay on the CPU."""
    parts = [name for name, part in model.named_modules() if isinstance(part, CpuState)]
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in found.items() if name.rpartition(".")[0] not in parts}


@pytest.mark.parametrize("name", sorted(ctta.METHODS))
def test_a_constructor_and_a_fork_build_state_where_the_network_is(name: str) -> None:
    """The meta device stands for any other than the CPU."""
    cls = ctta.METHODS[name]
    net = make_network(cls)
    settings: dict[str, Any] = {}
    if cls.info is not None and cls.info.needs_source_data:
        settings["source_stats"] = ctta.source_stats(net, [torch.rand(16, 3, 8, 8)])
        settings["source_stats"].is_verified = True  # a network without values has no fingerprint
    model = cls(net.to("meta"), **settings)
    for built in (model, model.fork()):
        assert {key for key, value in list_tensors(built).items() if value.device.type != "meta"} == set()


@pytest.mark.parametrize("name", ["vane", "delta", "tribe", "rotta", "adacontrast"])
def test_a_fork_has_the_dtypes_of_the_stream(name: str) -> None:
    model = ctta.METHODS[name](make_network(ctta.METHODS[name])).double()
    dtypes = {key: value.dtype for key, value in model.fork().state_dict().items()}
    assert dtypes == {key: value.dtype for key, value in model.state_dict().items()}
