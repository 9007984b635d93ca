"""Deploying an adapted network, and the threshold by the rule of CoTTA's reference implementation."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError
from ctta.nn import NormHook, attach_norm_hooks_
from ctta.policies import Policy, parse_policy


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(216, 4)
    )


def make_batches(count: int = 4, shift: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(10, 3, 8, 8, generator=generator) * (1 - shift) + shift for _ in range(count)]


def adapt_cotta() -> ctta.CoTTA:
    model = ctta.CoTTA(make_net(), views=ctta.views.image_views(2), decay=0.5)
    for x in make_batches():
        model(x)
    return model


def test_without_batches_the_deployed_network_predicts_as_the_teacher_does() -> None:
    model, x = adapt_cotta(), make_batches()[0]
    plain = model.deploy()
    expected = model.teacher(x).detach()
    assert torch.equal(plain(x), expected)
    assert torch.equal(plain.eval()(x), expected), "eval() must not bring the old running statistics back"
    assert not torch.equal(plain.state_dict()["0.weight"], make_net().state_dict()["0.weight"])
    make_net().load_state_dict(plain.state_dict())


def test_with_batches_the_running_statistics_are_estimated_from_them() -> None:
    trained = make_net()
    for x in make_batches():
        trained(x)  # so that there are statistics and a count of batches to replace
    model = ctta.CoTTA(trained, views=())
    plain = model.deploy(make_batches(shift=0.5))
    assert isinstance(plain, nn.Sequential) and isinstance(plain[1], nn.BatchNorm2d)
    features = [plain[0](x) for x in make_batches(shift=0.5)]
    means = torch.stack([f.mean((0, 2, 3)) for f in features]).mean(0)
    variances = torch.stack([f.transpose(0, 1).flatten(1).var(1) for f in features]).mean(0)
    torch.testing.assert_close(plain[1].running_mean, means)
    torch.testing.assert_close(plain[1].running_var, variances)
    assert plain[1].momentum == 0.1
    x = make_batches()[0]
    torch.testing.assert_close(plain(x)[:1], plain(x[:1]))


def test_deployed_networks_are_trainable_and_have_no_hooks() -> None:
    frozen = make_net()
    frozen[0].requires_grad_(False)
    model = ctta.CoTTA(frozen, views=())
    plain = model.deploy(make_batches())
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in frozen.parameters()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    assert isinstance(plain(make_batches()[0]), Tensor)


class DoubledNorm(NormHook):
    """A hook of a contributor."""

    def before(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (2 * inputs[0],)

    def after(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layer.extra_repr()


class HookedTent(ctta.Tent):
    """A method that puts hooks on its student: one of the library's base class, and plain functions."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        attach_norm_hooks_(self.student, lambda _: DoubledNorm())
        self.student.get_submodule("0").register_forward_hook(lambda *given: given[-1] + 1, always_call=True)
        self.source.register_forward_pre_hook(lambda module, inputs: None, with_kwargs=False)
        self.student.get_submodule("0").register_full_backward_hook(lambda *given: None)
        self.student.register_state_dict_pre_hook(lambda *given: None)


def test_only_hooks_of_the_caller_stay_on_a_deployed_network() -> None:
    net, calls = make_net(), []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    model = HookedTent(net)
    model(make_batches()[0])
    for adapted in (model, model.fork(), model.reset()):
        plain = adapted.deploy(make_batches())
        own = [(name, *m._forward_hooks, *m._forward_pre_hooks) for name, m in plain.named_modules()]
        assert [found for found in own if len(found) > 1] == [("0", *net[0]._forward_hooks)]
        assert not plain.get_submodule("0")._forward_hooks_always_called
        assert not plain.get_submodule("0")._backward_hooks and not plain._state_dict_pre_hooks
        calls.clear()
        plain(make_batches()[0])
        assert calls == [1]
        assert len(adapted.source._forward_pre_hooks) == 2  # of the library and of the method, once


class OtherName(ctta.AdaptiveModel):
    """A method whose trained network is not called student."""

    def __init__(self, net: nn.Module, *, policies: Sequence[Policy] = ()) -> None:
        super().__init__(net, lr=0.1, policies=policies)
        self.learner = self.copy_of_source()
        self.optimize(self.learner, torch.optim.SGD)

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.learner(x)
        self.minimize(ctta.functional.entropy(logits).mean())
        return logits


@pytest.mark.parametrize("policy", ["restore", "average_with_source", "kalman", "reset_every"])
def test_the_declared_network_is_deployed_and_given_to_policies_whatever_its_name(policy: str) -> None:
    model, x = OtherName(make_net(), policies=[parse_policy(policy)]), make_batches()[0]
    model(x)
    pairs = zip(model.deploy().parameters(), model.source.parameters(), strict=True)
    assert any(not torch.equal(adapted, original) for adapted, original in pairs)
    torch.testing.assert_close(model.deploy()(x), model.predict(x))
    assert torch.equal(model.predict_once(x), model.learner(x))


def test_a_network_on_several_devices_stays_there() -> None:
    net = make_net()
    last = list(net)[-1].to("meta")
    model = ctta.Tent(net, output=lambda raw: raw)
    assert {value.device.type for value in model.student.parameters()} == {"cpu", "meta"}
    assert next(last.parameters()).is_meta


def test_a_network_must_be_an_attribute_before_it_is_trained() -> None:
    class Early(ctta.AdaptiveModel):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            student = self.copy_of_source()
            self.optimize(student, partial(torch.optim.SGD, lr=0.1))
            self.student = student

        def adapt_step(self, x: Tensor) -> Tensor:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="attribute before optimize"):
        Early(make_net())


def test_deploying_with_an_empty_iterable_is_an_error() -> None:
    with pytest.raises(ctta.InputError):
        adapt_cotta().deploy([])


def test_tent_deploys_its_student_and_source_the_source() -> None:
    tent = ctta.Tent(make_net())
    tent(make_batches()[0])
    assert torch.equal(tent.deploy().get_parameter("1.weight"), tent.student.get_parameter("1.weight"))
    x = make_batches()[0]
    assert torch.equal(ctta.Source(make_net()).deploy()(x), make_net().eval()(x))


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_the_threshold_is_a_low_quantile_of_confidence_minus_a_margin(fraction: float) -> None:
    source = ctta.BNStats(make_net(), batch_stats=fraction)
    confidences = np.concatenate([source(x).softmax(1).amax(1).numpy() for x in make_batches()])
    expected = np.quantile(confidences, 0.05) - 0.05
    threshold = ctta.calibrate_threshold(make_net(), make_batches(), batch_stats=fraction)
    assert threshold == pytest.approx(expected, abs=1e-6)
    labeled = [(x, torch.zeros(10)) for x in make_batches()]
    assert ctta.calibrate_threshold(make_net(), labeled, batch_stats=fraction) == threshold


def test_calibration_needs_images_and_leaves_the_network_unchanged() -> None:
    source = make_net()
    before = {key: value.clone() for key, value in source.state_dict().items()}
    ctta.calibrate_threshold(source, make_batches())
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())
    assert source.training
    with pytest.raises(ctta.InputError):
        ctta.calibrate_threshold(source, [])
    with pytest.raises(ctta.ConfigError):
        ctta.calibrate_threshold(source, make_batches(), quantile=5)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (torch.rand(10, 3, 8, 8), TypeError),
        ([{"images": torch.rand(10, 3, 8, 8)}], TypeError),
        ([torch.full((10, 3, 8, 8), torch.nan)], ctta.InputError),
    ],
    ids=["one tensor", "dict", "nan"],
)
def test_batches_of_the_wrong_type(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        adapt_cotta().deploy(given)
    with pytest.raises(error):
        ctta.calibrate_threshold(make_net(), given)
