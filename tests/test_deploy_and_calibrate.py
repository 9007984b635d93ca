"""Leaving the library again, and the threshold by the authors' rule."""

import numpy as np
import pytest
import torch
from torch import nn

import ctta


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(216, 4)
    )


def batches(count: int = 4, shift: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(10, 3, 8, 8, generator=generator) * (1 - shift) + shift for _ in range(count)]


def adapted() -> ctta.CoTTA:
    model = ctta.CoTTA(net(), views=ctta.views.image_views(2), decay=0.5)
    for x in batches():
        model(x)
    return model


def test_without_batches_the_deployed_network_answers_as_the_teacher_on_batch_statistics() -> None:
    model, x = adapted(), batches()[0]
    plain = model.deploy()
    expected = model.teacher(x).detach()
    assert torch.equal(plain(x), expected)
    assert torch.equal(plain.eval()(x), expected), "eval() must not bring the old running statistics back"
    assert not torch.equal(plain.state_dict()["0.weight"], net().state_dict()["0.weight"])
    net().load_state_dict(plain.state_dict())


def test_with_batches_the_running_statistics_are_those_of_the_batches() -> None:
    trained = net()
    for x in batches():
        trained(x)  # so that there are statistics and a count of batches to replace
    model = ctta.CoTTA(trained, views=())
    plain = model.deploy(batches(shift=0.5))
    features = [plain[0](x) for x in batches(shift=0.5)]
    means = torch.stack([f.mean((0, 2, 3)) for f in features]).mean(0)
    variances = torch.stack([f.transpose(0, 1).flatten(1).var(1) for f in features]).mean(0)
    torch.testing.assert_close(plain[1].running_mean, means)
    torch.testing.assert_close(plain[1].running_var, variances)
    assert plain[1].momentum == 0.1
    x = batches()[0]
    torch.testing.assert_close(plain(x)[:1], plain(x[:1]))


def test_deployed_networks_can_be_trained_and_hold_nothing_of_ours() -> None:
    frozen = net()
    frozen[0].requires_grad_(False)
    model = ctta.CoTTA(frozen, views=())
    plain = model.deploy(batches())
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in frozen.parameters()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    assert isinstance(plain(batches()[0]), torch.Tensor)


def test_deploying_with_no_batches_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no batches"):
        adapted().deploy([])


def test_tent_deploys_its_student_and_source_itself() -> None:
    tent = ctta.Tent(net())
    tent(batches()[0])
    assert torch.equal(tent.deploy()[1].weight, tent.student[1].weight)
    x = batches()[0]
    assert torch.equal(ctta.Source(net()).deploy()(x), net().eval()(x))


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_the_threshold_is_the_low_quantile_of_confidence_minus_the_margin(share: float) -> None:
    source = ctta.BNStats(net(), batch_stats=share)
    confidences = np.concatenate([source(x).softmax(1).amax(1).numpy() for x in batches()])
    expected = np.quantile(confidences, 0.05) - 0.05
    ours = ctta.calibrate_threshold(net(), batches(), batch_stats=share)
    assert ours == pytest.approx(expected, abs=1e-6)
    labelled = [(x, torch.zeros(10)) for x in batches()]
    assert ctta.calibrate_threshold(net(), labelled, batch_stats=share) == ours


def test_calibration_leaves_the_network_alone_and_needs_images() -> None:
    source = net()
    before = {key: value.clone() for key, value in source.state_dict().items()}
    ctta.calibrate_threshold(source, batches())
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())
    assert source.training
    with pytest.raises(ValueError, match="at least one batch"):
        ctta.calibrate_threshold(source, [])
    with pytest.raises(ValueError, match="quantile"):
        ctta.calibrate_threshold(source, batches(), quantile=5)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (torch.rand(10, 3, 8, 8), TypeError),
        ([{"images": torch.rand(10, 3, 8, 8)}], TypeError),
        ([torch.full((10, 3, 8, 8), torch.nan)], ValueError),
    ],
    ids=["one tensor", "dict", "nan"],
)
def test_batches_of_the_wrong_kind(given, error: type[Exception]) -> None:
    with pytest.raises(error):
        adapted().deploy(given)
    with pytest.raises(error):
        ctta.calibrate_threshold(net(), given)
