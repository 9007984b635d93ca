"""Checks of the wrapped network: which kinds are accepted, that it stays untouched, what ``deploy`` returns."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.checkpoint.files import load, save
from ctta.nn.heads import find_head
from ctta.testing.case import ContractCase, assert_equal, collect_state, register_check, run_stream


class _NetworkWrapper(nn.Module):
    """A network around another one; the subclasses vary its forward pass."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class _HuggingFaceOutput(_NetworkWrapper):
    @override
    def forward(self, x: Tensor) -> Any:
        return type("Output", (), {"logits": self.net(x)})()


class _DictOutput(_NetworkWrapper):
    @override
    def forward(self, x: Tensor) -> Any:
        return {"out": self.net(x), "aux": x}


class _WithDropout(_NetworkWrapper):
    @override
    def forward(self, x: Tensor) -> Any:
        return nn.functional.dropout(self.net(nn.functional.dropout(x, 0.5, self.training)), 0.5, self.training)


class _HalvesInPlace(_NetworkWrapper):
    @override
    def forward(self, x: Tensor) -> Any:
        return self.net(x.mul_(0.5))


class _Halves(_NetworkWrapper):
    @override
    def forward(self, x: Tensor) -> Any:
        return self.net(x * 0.5)


class _WithUnused(_NetworkWrapper):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.unused = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))

    def get_classifier(self) -> nn.Module:
        """Return the head, as timm's networks do: it is not the last layer here."""
        return self.net.get_submodule(find_head(self.net))


class _WithTied(_NetworkWrapper):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.alias = net


@register_check
def check_network_and_input_are_untouched(case: ContractCase) -> None:
    """Check that the weights, modes and flags of the caller's network, and the input, stay as they are."""
    net, x = case.make_network(), case.make_batch(0)
    modes, before, original = [module.training for module in net.modules()], collect_state(net), x.clone()
    flags = [parameter.requires_grad for parameter in net.parameters()]
    case.make_model(net)(x)
    assert_equal(collect_state(net), before, "the caller's weights and buffers")
    assert [module.training for module in net.modules()] == modes, "the caller's modes changed"
    assert [parameter.requires_grad for parameter in net.parameters()] == flags, "requires_grad changed"
    assert all(parameter.grad is None for parameter in net.parameters()), "the caller's network got gradients"
    assert torch.equal(x, original), "the input changed"


@register_check
def check_state_dict_keys_are_kept(case: ContractCase) -> None:
    """Check that copies of the network keep its ``state_dict`` keys, and the source all of its values."""
    net, model = case.make_network(), case.make_model()
    run_stream(model, case.make_stream())
    for name, part in model.named_children():
        state = part.state_dict()
        if part.__class__ is net.__class__:
            assert state.keys() == net.state_dict().keys(), f"{name} lost or gained keys"
    for key, value in net.state_dict().items():
        assert torch.equal(model.source.state_dict()[key], value), f"the source's {key} changed"


@register_check
def check_finds_logits_in_common_outputs(case: ContractCase) -> None:
    """Check that logits are found in Hugging Face outputs and in dictionaries."""
    expected = case.expected_logits
    for wrapper in (_HuggingFaceOutput, _DictOutput):
        model = case.make_model(wrapper(case.make_network()))
        assert_equal(run_stream(model, case.make_stream()), expected, wrapper.__name__)


@register_check
def check_networks_may_write_to_their_input(case: ContractCase) -> None:
    """Check that a network may change its input in place without harm to the caller's batch."""
    stream = case.make_stream()
    expected = run_stream(case.make_model(_Halves(case.make_network())), case.make_stream())
    logits = run_stream(case.make_model(_HalvesInPlace(case.make_network())), stream)
    assert_equal(stream, case.make_stream(), "the input of a network that writes to it")
    assert_equal(logits, expected, "a network that writes to its input")


@register_check
def check_dropout_is_off(case: ContractCase) -> None:
    """Check that dropout is off, whatever the mode of the caller's network."""
    expected = case.expected_logits
    model = case.make_model(_WithDropout(case.make_network()).train())
    assert_equal(run_stream(model, case.make_stream()), expected, "with dropout")


@register_check
def check_unused_and_tied_parameters(case: ContractCase) -> None:
    """Check that unused parameters change nothing; tied ones survive saving and loading."""
    expected = case.expected_logits
    unused = case.make_model(_WithUnused(case.make_network()))
    assert_equal(run_stream(unused, case.make_stream()), expected, "with unused parameters")
    tied = case.make_model(_WithTied(case.make_network()))
    assert_equal(run_stream(tied, case.make_stream()), expected, "with tied parameters")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tied.safetensors"
        save(tied, path)
        again = load(path, _WithTied(case.make_network()), method=case.method, **case.unserializable_arguments())
    assert_equal(collect_state(again), collect_state(tied), "state of tied parameters after load")


@register_check
def check_frozen_parameters_are_kept(case: ContractCase) -> None:
    """Check that parameters that do not require grad in the caller's network never change."""
    net = case.make_network()
    fixed = [name for name, _ in net.named_parameters()][::2]
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in fixed)
    model = case.make_model(net)
    run_stream(model, case.make_stream())
    model.reset()
    run_stream(model, case.make_stream())
    for part in model.children():
        parameters = dict(part.named_parameters())
        for name in fixed:
            if name in parameters:
                assert torch.equal(parameters[name], net.get_parameter(name)), f"frozen parameter {name} changed"


@register_check
def check_unwraps_networks(case: ContractCase) -> None:
    """Check that compiled and data-parallel networks are adapted as the networks that they wrap."""
    expected = case.expected_logits
    wrappers: list[Callable[..., Any]] = [torch.compile, nn.DataParallel]
    for wrapped in (wrap(case.make_network()) for wrap in wrappers):
        assert_equal(run_stream(case.make_model(wrapped), case.make_stream()), expected, type(wrapped).__name__)


@register_check
def check_deploys_plain_network(case: ContractCase) -> None:
    """Check that ``deploy`` returns a network of the caller's class, with statistics of its batches."""
    net, model = case.make_network(), case.make_model()
    run_stream(model, case.make_stream())
    before = collect_state(model)
    for plain in (model.deploy(), model.deploy(case.make_stream()), model.deploy([(case.make_batch(0), "label")])):
        assert type(plain) is type(net), f"deploy returned a {type(plain).__name__}, expected a {type(net).__name__}"
        keys, expected_keys = set(plain.state_dict()), set(net.state_dict())
        assert keys == expected_keys, f"deploy changed keys of the state_dict: {sorted(keys ^ expected_keys)}"
        shape, expected = plain(case.make_batch(0)).shape, net(case.make_batch(0)).shape
        assert shape == expected, f"the deployed network returns {tuple(shape)}, expected {tuple(expected)}"
    assert_equal(collect_state(model), before, "state after deploy")
    for name, module in model.deploy(case.make_stream()).named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            # A hook of the method may have kept the layer from seeing the batches.
            assert module.running_mean.any(), f"deploy did not estimate the statistics of {name!r} from the batches"
