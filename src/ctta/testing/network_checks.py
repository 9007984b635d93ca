"""Checks of the network that is wrapped: any kind, never touched, given back."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctta.checkpoint.files import load, save
from ctta.testing.case import Case, assert_same, contract, run, state_of


class _Inside(nn.Module):
    """A network with another one inside, for variants of it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class _HuggingFaceStyle(_Inside):
    def forward(self, x: Tensor) -> Any:
        return type("Output", (), {"logits": self.net(x)})()


class _DictOutput(_Inside):
    def forward(self, x: Tensor) -> Any:
        return {"out": self.net(x), "aux": x}


class _Dropping(_Inside):
    def forward(self, x: Tensor) -> Any:
        return nn.functional.dropout(self.net(nn.functional.dropout(x, 0.5, self.training)), 0.5, self.training)


class _InPlace(_Inside):
    def forward(self, x: Tensor) -> Any:
        return self.net(x.mul_(0.5))


class _Halving(_Inside):
    def forward(self, x: Tensor) -> Any:
        return self.net(x * 0.5)


class _WithUnused(_Inside):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.unused = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))


class _WithTied(_Inside):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.alias = net


@contract
def leaves_the_callers_network_and_input_alone(case: Case) -> None:
    net, x = case.net(), case.batch(0)
    modes, before, original = [module.training for module in net.modules()], state_of(net), x.clone()
    flags = [parameter.requires_grad for parameter in net.parameters()]
    case.model(net)(x)
    assert_same(state_of(net), before, "the caller's weights and buffers")
    assert [module.training for module in net.modules()] == modes, "the caller's modes changed"
    assert [parameter.requires_grad for parameter in net.parameters()] == flags, "requires_grad changed"
    assert all(parameter.grad is None for parameter in net.parameters()), "the caller's network got gradients"
    assert torch.equal(x, original), "the input changed"


@contract
def keeps_every_key_of_the_state_dict_and_the_running_statistics(case: Case) -> None:
    net, model = case.net(), case.model()
    run(model, case.stream())
    for name, part in model.named_children():
        state = part.state_dict()
        if part.__class__ is net.__class__:
            assert state.keys() == net.state_dict().keys(), f"{name} lost or gained keys"
    for key, value in net.state_dict().items():
        assert torch.equal(model.source.state_dict()[key], value), f"the source's {key} changed"


@contract
def finds_logits_in_every_usual_output(case: Case) -> None:
    expected = run(case.model(), case.stream())
    for wrapper in (_HuggingFaceStyle, _DictOutput):
        assert_same(run(case.model(wrapper(case.net())), case.stream()), expected, wrapper.__name__)


@contract
def networks_that_write_to_their_input_harm_nothing(case: Case) -> None:
    stream = case.stream()
    answers = run(case.model(_InPlace(case.net())), stream)
    assert_same(stream, case.stream(), "the input of a network that writes to it")
    assert_same(answers, run(case.model(_Halving(case.net())), case.stream()), "a network that writes to its input")


@contract
def dropout_stays_off(case: Case) -> None:
    expected = run(case.model(), case.stream())
    assert_same(run(case.model(_Dropping(case.net()).train()), case.stream()), expected, "with dropout")


@contract
def takes_unused_and_tied_parameters(case: Case) -> None:
    expected = run(case.model(), case.stream())
    assert_same(run(case.model(_WithUnused(case.net())), case.stream()), expected, "with unused parameters")
    tied = case.model(_WithTied(case.net()))
    assert_same(run(tied, case.stream()), expected, "with tied parameters")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tied.safetensors"
        save(tied, path)
        again = load(path, _WithTied(case.net()), method=case.method, **case.not_storable())
    assert_same(state_of(again), state_of(tied), "state of tied parameters after load")


@contract
def frozen_parameters_stay(case: Case) -> None:
    net = case.net()
    fixed = [name for name, _ in net.named_parameters()][::2]
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in fixed)
    model = case.model(net)
    run(model, case.stream())
    model.reset()
    run(model, case.stream())
    for part in model.children():
        parameters = dict(part.named_parameters())
        for name in fixed:
            if name in parameters:
                assert torch.equal(parameters[name], net.get_parameter(name)), f"frozen parameter {name} changed"


@contract
def takes_compiled_and_data_parallel_networks(case: Case) -> None:
    expected = run(case.model(), case.stream())
    wrappers: list[Callable[..., Any]] = [torch.compile, nn.DataParallel]
    for wrapped in (wrap(case.net()) for wrap in wrappers):
        assert_same(run(case.model(wrapped), case.stream()), expected, type(wrapped).__name__)


@contract
def deploys_a_plain_network_of_the_callers_class(case: Case) -> None:
    net, model = case.net(), case.model()
    run(model, case.stream())
    before = state_of(model)
    for plain in (model.deploy(), model.deploy(case.stream()), model.deploy([(case.batch(0), "label")])):
        assert type(plain) is type(net)
        assert plain.state_dict().keys() == net.state_dict().keys()
        assert plain(case.batch(0)).shape == net(case.batch(0)).shape
    assert_same(state_of(model), before, "state after deploy")
