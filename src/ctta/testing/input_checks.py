"""Checks of what goes in: batches and networks of all kinds, valid, extreme and invalid; they stay untouched."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ctta.checkpoint.files import load, save
from ctta.errors import ConfigError, InputError
from ctta.nn.heads import find_head
from ctta.nn.surgery import find_hooks
from ctta.testing.case import (
    ContractCase,
    assert_equal,
    collect_state,
    collect_tensors,
    count_optimizer_steps,
    register_check,
    run_stream,
)

# ---- batches and the modes around a call ----


@register_check
def check_returns_detached_logits(case: ContractCase) -> None:
    """Check that logits have the network's number of rows and classes, dense ones the input's size, and no graph."""
    x = case.make_batch(0)
    logits, expected = case.make_model()(x), case.make_network()(x)
    assert logits.shape[:2] == expected.shape[:2], f"logits of shape {tuple(logits.shape)}"
    assert logits.ndim != x.ndim or logits.shape[2:] == x.shape[2:], "dense logits must have the input's size"
    assert not logits.requires_grad, "logits must be detached"


@register_check
def check_adapts_under_no_grad_and_inference_mode(case: ContractCase) -> None:
    """Check that ``eval()``, ``no_grad`` and ``inference_mode`` around the loop change nothing."""
    plain = case.make_model()
    expected = run_stream(plain, case.make_stream())
    without_grad = case.make_model().eval()
    with torch.no_grad():
        assert_equal(run_stream(without_grad, case.make_stream()), expected, "logits under eval and no_grad")
    inferring = case.make_model()
    with torch.inference_mode():
        assert_equal(run_stream(inferring, case.make_stream()), expected, "logits under inference_mode")
    for model in (without_grad, inferring):
        assert_equal(collect_state(model), collect_state(plain), "state under eval, no_grad or inference_mode")


@register_check
def check_autocast_sees_updated_weights(case: ContractCase) -> None:
    """Check that one ``autocast`` around the whole loop equals one around each call."""
    around_loop, around_call = case.make_model(), case.make_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run_stream(around_loop, case.make_stream())
    for x, logits in zip(case.make_stream(), expected, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(around_call(x), logits), "autocast around the loop predicts with cached weights"
    assert_equal(collect_state(around_loop), collect_state(around_call), "state under autocast")


@register_check
def check_train_and_eval_keep_network_modes(case: ContractCase) -> None:
    """Check that ``train()`` and ``eval()`` set the flag of the model and leave its networks alone."""
    model = case.make_model()
    modes = [module.training for module in model.source.modules()]
    model.train()
    assert model.training, "train() does not set the model's flag"
    assert [module.training for module in model.source.modules()] == modes, "train() changed the modes of the source"
    assert not model.eval().training, "eval() does not clear the model's flag"


@register_check
def check_empty_batch_is_returned(case: ContractCase) -> None:
    """Check that an empty batch comes back as the same object and changes nothing."""
    model = case.make_model()
    before, empty = collect_state(model), case.make_batch(0)[:0]
    assert model(empty) is empty, "calling the model with an empty batch must return that batch"
    assert model.predict(empty) is empty, "predict of an empty batch must return that batch"
    assert_equal(collect_state(model), before, "state after an empty batch")


@register_check
def check_bad_input_changes_nothing(case: ContractCase) -> None:
    """Check that NaN, infinite, integer and unbatched inputs raise InputError or TypeError before anything changes."""
    model = case.make_model()
    model(case.make_batch(0))
    before = collect_state(model)
    with_nan = case.make_batch(1)
    with_nan[0, 0, 0, 0] = torch.nan
    bad = [
        with_nan,
        case.make_batch(1).mul(torch.inf),
        case.make_batch(1)[0],
        case.make_batch(1).mul(255).byte(),
        torch.rand(()),
    ]
    for x in bad:
        for call in (model, model.predict):
            try:
                call(x)
            except (InputError, TypeError):
                assert_equal(collect_state(model), before, "state after a rejected batch")
            else:
                raise AssertionError(f"a bad input was accepted: {x.dtype} {tuple(x.shape)}")


@register_check
def check_non_finite_step_is_skipped(case: ContractCase) -> None:
    """Check that a step whose loss is not finite predicts, is counted, and updates nothing.

    A method that selects samples may select none of a batch without finite predictions, and take no step at all.
    """
    model = case.make_model()
    student = getattr(model, "student", None)
    if student is None:
        return  # a method without a student makes no updates that could fail
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.fill_(torch.nan)
    before = [tensor.nan_to_num() for tensor in collect_tensors(model)]
    with count_optimizer_steps(model) as steps:
        assert model(case.make_batch(0)).shape[0] == 6, "no prediction for a batch whose loss is not finite"
    assert_equal([tensor.nan_to_num() for tensor in collect_tensors(model)], before, "state after a skipped step")
    assert not steps, "the optimizer stepped with a loss that is not finite: call self.minimize(loss), which checks it"
    assert model.num_steps == 1, f"num_steps is {model.num_steps} after one batch whose loss is not finite, expected 1"
    step = model.last_step
    if model.num_skipped == 0 and (step is None or (step.selected is not None and not step.selected > 0)):
        return  # it selected no sample, so there was no loss to minimize
    assert model.num_skipped == 1, (
        f"num_skipped is {model.num_skipped} after one batch whose loss is not finite, expected 1"
    )
    assert model.last_step is not None and model.last_step.skipped, (
        f"last_step is {model.last_step} after a skipped step, expected one with skipped=True"
    )


@register_check
def check_accepts_any_memory_format(case: ContractCase) -> None:
    """Check that channels-last and non-contiguous inputs give the same logits, up to rounding."""
    x = case.make_batch(0)
    expected = case.make_model()(x)
    strided = torch.stack([x, x], -1)[..., 0]
    assert not strided.is_contiguous(), "the strided batch of this check is contiguous"
    for name, variant in (("channels-last", x.to(memory_format=torch.channels_last)), ("non-contiguous", strided)):
        message = f"logits of a {name} batch differ by more than rounding from those of a contiguous one"
        torch.testing.assert_close(case.make_model()(variant), expected, msg=message)


@register_check
def check_extreme_batches_stay_finite(case: ContractCase) -> None:
    """Check that a single image, equal images and a short last batch leave logits and state finite."""
    one, equal = case.make_batch(1, 1), case.make_batch(2, 1).expand(6, -1, -1, -1)
    _check_finite(case, case.make_network(), [case.make_batch(0), one, equal, case.make_batch(3, 2)])


@register_check
def check_extreme_predictions_stay_finite(case: ContractCase) -> None:
    """Check logits of 1e4, uniform predictions, of which none is reliable, and two classes."""
    for scale, num_classes in ((1e4, None), (0.0, None), (1.0, 2)):
        net = case.make_network()
        if _change_head_(net, scale, num_classes):
            _check_finite(case, net, [case.make_batch(0), case.make_batch(1, 3)])


def _check_finite(case: ContractCase, net: nn.Module, stream: list[Tensor]) -> None:
    model = case.make_model(net)
    for x in stream:
        logits = model(x)
        assert logits.isfinite().all(), f"logits of a batch of {len(x)} are not finite"
        assert not model.last_step or model.last_step.loss.isfinite(), "the loss is not finite"
    assert model.num_skipped == 0, "a step was not finite"
    assert not any(tensor.isnan().any() for tensor in collect_tensors(model)), "a state is NaN"


@torch.no_grad()
def _change_head_(net: nn.Module, scale: float, num_classes: int | None) -> bool:
    """Scale the logits of a network, or keep the first classes only; return False if its head was not found."""
    try:
        head = net.get_submodule(find_head(net))
    except ConfigError:
        return False
    assert isinstance(head, nn.Linear | nn.Conv2d), f"the head is a {type(head).__name__}"
    head.weight = nn.Parameter(head.weight[:num_classes] * scale)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[:num_classes] * scale)
    if isinstance(head, nn.Linear):
        head.out_features = len(head.weight)
    else:
        head.out_channels = len(head.weight)
    return True


# ---- networks ----


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


class _CountsCalls(_NetworkWrapper):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.register_buffer("num_calls", torch.zeros(()))

    @override
    def forward(self, x: Tensor) -> Any:
        self.get_buffer("num_calls").add_(1)
        return self.net(x)


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
def check_networks_may_count_their_calls(case: ContractCase) -> None:
    """Check that streams of a network that writes to a persistent buffer resume, and predict without writing to it."""
    net = _CountsCalls(case.make_network())
    model = case.make_model(net)
    run_stream(model, case.make_stream())
    states = [(name, part.state_dict()) for name, part in model.named_children()]
    counts = {name: state["num_calls"].clone() for name, state in states if "num_calls" in state}
    model.predict(case.make_batch(3))
    for name, count in counts.items():
        assert torch.equal(model.get_submodule(name).get_buffer("num_calls"), count), f"predict wrote to {name}"
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "stream")
        resumed = load(Path(folder) / "stream", net, method=case.method, **case.unserializable_arguments())
    assert_equal([resumed(case.make_batch(3))], [model(case.make_batch(3))], "logits after load")


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
    """Check that ``deploy`` returns a network of the caller's class without hooks, with statistics of its batches."""
    net, model = case.make_network(), case.make_model()
    run_stream(model, case.make_stream())
    before = collect_state(model)
    for plain in (model.deploy(), model.deploy(case.make_stream()), model.deploy([(case.make_batch(0), "label")])):
        assert type(plain) is type(net), f"deploy returned a {type(plain).__name__}, expected a {type(net).__name__}"
        keys, expected_keys = set(plain.state_dict()), set(net.state_dict())
        # A method may keep what it has learned in buffers or biases that the network does not have.
        assert keys >= expected_keys, f"deploy lost keys of the state_dict: {sorted(expected_keys - keys)}"
        shape, expected = plain(case.make_batch(0)).shape, net(case.make_batch(0)).shape
        assert shape == expected, f"the deployed network returns {tuple(shape)}, expected {tuple(expected)}"
    assert_equal(collect_state(model), before, "state after deploy")
    added = find_hooks(model) - find_hooks(net)  # what deploy itself adds may stay, such as learned prompts
    for name, module in model.deploy(case.make_stream()).named_modules():
        assert not find_hooks(module) & added, f"deploy left a hook on {name!r} that the method has put on its network"
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            assert module.running_mean.any(), f"deploy did not estimate the statistics of {name!r} from the batches"
