"""The methods for detectors keep the contract of every method, and equal naive implementations."""

from typing import Any

import pytest
import torch
from naive_detection import NaiveActMAD, NaiveBoxCoTTA, NaiveWHW
from torch import Tensor, nn

import ctta
from ctta.core.model import AdaptiveModel
from ctta.detection import (
    DETECTION_METHODS,
    WHW,
    ActMAD,
    BNStatsDetector,
    BoxCoTTA,
    ShiftStatisticsDetector,
    SourceDetector,
    YOLOv5,
    YOLOv5Detector,
    detection_stats,
)
from ctta.errors import ConfigError, InputError
from ctta.guard import EventKind
from ctta.guard.boxes import GuardedDetector
from ctta.source_stats import SourceStats
from ctta.testing import CHECKS, ContractCase
from ctta.testing.case import SHORT_STREAM, count_learned_batches


class Packed:
    """Answers that are one tensor, which the checks of the contract compare."""

    def adapt(self, x: Tensor) -> Tensor:
        return AdaptiveModel.adapt(self, x)  # type: ignore[arg-type]

    def predict(self, x: Tensor) -> Tensor:
        return AdaptiveModel.predict(self, x)  # type: ignore[arg-type]

    def predict_once(self, x: Tensor) -> Tensor:
        return AdaptiveModel.predict_once(self, x)  # type: ignore[arg-type]


class PackedSource(Packed, SourceDetector): ...  # type: ignore[misc]


class PackedBNStats(Packed, BNStatsDetector): ...  # type: ignore[misc]


class PackedShift(Packed, ShiftStatisticsDetector): ...  # type: ignore[misc]


class PackedActMAD(Packed, ActMAD): ...  # type: ignore[misc]


class PackedCoTTA(Packed, BoxCoTTA): ...  # type: ignore[misc]


class PackedWHW(Packed, WHW): ...  # type: ignore[misc]


def make_yolo(num_classes: int = 3, spread: float = 8.0) -> YOLOv5:
    """Return a tiny network whose random scores are spread over (0, 1), many of them high."""
    net = YOLOv5(num_classes, width=0.125)
    for layer in net.head.m:
        assert isinstance(layer, nn.Conv2d)
        assert layer.bias is not None
        layer.weight.data *= spread
        layer.bias.data.view(3, -1)[:, 4:] += min(spread, 2.0)
    return net.eval()


def make_detector() -> YOLOv5Detector:
    return YOLOv5Detector(make_yolo(), max_detections=8)


def make_stats() -> SourceStats:
    case = ContractCase(PackedSource, make_detector, {})
    return detection_stats(case.make_network(), [case.make_batch(-1), case.make_batch(-2)])


SETTINGS: dict[type[AdaptiveModel], dict[str, Any]] = {
    PackedSource: {},
    PackedBNStats: {},
    PackedShift: {},
    PackedActMAD: {"per": "channel"},
    PackedCoTTA: {"min_threshold": 0.0, "threshold_decay": 0.5, "batch_stats": 0.0, "flip": False},  # for speed
    PackedWHW: {"always": True},
}


#: These put a classifier into another network, or compare numbers at their places: boxes of nearly equal scores change
#: places.
FOR_CLASSIFIERS = (
    "check_accepts_any_memory_format",
    "check_dropout_is_off",
    "check_extreme_predictions_stay_finite",
    "check_finds_logits_in_common_outputs",
    "check_networks_may_count_their_calls",
    "check_networks_may_write_to_their_input",
    "check_unused_and_tied_parameters",
)


@pytest.mark.parametrize("method", SETTINGS, ids=lambda method: method.__name__)
def test_contract(method: type[AdaptiveModel]) -> None:
    needs_stats = method.info is not None and method.info.needs_source_data
    settings = SETTINGS[method] | ({"source_stats": make_stats()} if needs_stats else {})
    case = ContractCase(method, make_detector, settings, SHORT_STREAM)
    for name, check in CHECKS.items():
        if name == "check_deploys_plain_network" and method is PackedWHW:
            continue  # whose adaptors are part of what it deploys
        if name not in FOR_CLASSIFIERS:
            check(case)
    assert count_learned_batches(case) in ((3,) if case.make_model().optimizer else (None,))


def make_double(seed: int = 0) -> YOLOv5:
    torch.manual_seed(seed)
    net = make_yolo().double()
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.1)
        if name.endswith("running_var"):
            buffer.fill_(0.7)  # or deep layers hardly depend on the image
    return net


def make_images(seed: int, size: int = 3) -> Tensor:
    return torch.rand(size, 3, 64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same_weights(ours: nn.Module, theirs: nn.Module, start: nn.Module) -> None:
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-10
    moved = zip(ours.parameters(), start.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in moved) > 1e-6, "nothing was learned"


@pytest.mark.parametrize("per", ["location", "channel"])
def test_actmad_equals_naive(per: str) -> None:
    net, source = make_double(), [make_images(seed) for seed in (-1, -2)]
    model = ctta.detect(net, "actmad", source_stats=detection_stats(net, source), per=per, lr=1e-4, skip=20 / 57)
    assert isinstance(model, ActMAD)
    twin = NaiveActMAD(net, source, skip=20, per_location=per == "location", lr=1e-4)
    for seed in range(3):
        ours, theirs = model(make_images(seed) ** 2), twin(make_images(seed) ** 2)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one["boxes"], other["boxes"], rtol=0, atol=1e-10)
    student = model.student
    assert isinstance(student, YOLOv5Detector)
    assert_same_weights(student.net, twin.net, net)


def test_cotta_equals_naive() -> None:
    net = make_double()
    settings: dict[str, Any] = {"decay": 0.9, "min_threshold": 0.3, "lr": 1e-3}
    model = ctta.detect(net, "cotta", scales=(1.5,), restore=0.0, jitter=0.0, batch_stats=0.0, **settings)
    assert isinstance(model, BoxCoTTA)
    model.thresholds.fill_(0.31)
    twin = NaiveBoxCoTTA(net, scale=1.5, **settings)
    twin.thresholds = [0.31] * 3
    for seed in range(3):
        ours, theirs = model(make_images(seed, 2)), twin(make_images(seed, 2))
        assert twin.num_targets > 0
        for found, expected in zip(ours, theirs, strict=True):
            assert found["labels"].tolist() == [label for _, _, label in expected]
            assert torch.allclose(
                found["boxes"], found["boxes"].new_tensor([box for box, _, _ in expected]), atol=1e-10
            )
    assert torch.allclose(model.thresholds.double(), torch.tensor(twin.thresholds, dtype=torch.float64), atol=1e-6)
    assert isinstance(model.student, YOLOv5Detector)
    assert_same_weights(model.student.net, twin.student, net)
    teacher = model.teacher
    assert isinstance(teacher, YOLOv5Detector)
    assert_same_weights(teacher.net, twin.teacher, net)


@pytest.mark.parametrize("always", [True, False])
def test_whw_equals_naive(always: bool) -> None:
    net = make_double()
    computed = detection_stats(net, [make_images(seed, 12) for seed in (-1, -2)])
    # Features of a random network hardly vary, and inverting their covariance would magnify how sums are rounded.
    tensors = {
        name: value + 1e-2 * torch.eye(len(value)).to(value) if "covariance" in name else value
        for name, value in computed.tensors.items()
    }
    facts = {"fingerprint": computed.fingerprint, "num_images": computed.num_images, "is_labeled": False}
    stats = SourceStats(tensors, **facts)  # type: ignore[arg-type]
    model = ctta.detect(net, "whw", source_stats=stats, lr=1e-2, always=always)
    assert isinstance(model, WHW)
    twin = NaiveWHW(net, model.adaptors, stats.tensors, lr=1e-2, always=always)
    start = NaiveWHW(net, model.adaptors, stats.tensors, lr=1e-2, always=always).adaptors
    assert len(twin.labels) > 1
    for seed in range(12):
        scale = 1.0 if seed < 8 else 0.4  # a change, for which a pause ends
        ours, theirs = model(scale * make_images(seed, 2)), twin(scale * make_images(seed, 2))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one["boxes"], other["boxes"], rtol=0, atol=1e-10)
    assert twin.num_updates == 12 if always else 0 < twin.num_updates < 12
    assert_same_weights(model.adaptors, twin.adaptors, start)


def test_bn_stats_equals_a_network_in_training_mode() -> None:
    net = make_double()
    [found] = ctta.detect(net, "bn_stats", batch_stats=1.0)(make_images(1, 1))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
            module.training = True
    [expected] = YOLOv5Detector(net).predict(make_images(1, 1))
    assert torch.allclose(found["boxes"], expected["boxes"], rtol=0, atol=1e-10)


def test_shift_statistics_approach_those_of_a_stream() -> None:
    net = make_double()
    dark = [0.2 * make_images(seed, 4) for seed in range(8)]
    model = ctta.detect(net, tolerance=0.0)
    for x in dark:
        model(x)
    student = model.student
    assert isinstance(student, nn.Module)
    first = next(module for module in student.modules() if isinstance(module, nn.BatchNorm2d))
    inputs: list[Tensor] = []
    norm = net.model[0].bn
    assert isinstance(norm, nn.BatchNorm2d) and first.running_mean is not None
    norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    net(torch.cat(dark))
    assert isinstance(model, ShiftStatisticsDetector)
    recent, source = model.statistics[0].get_buffer("mean"), norm.running_mean
    assert torch.allclose(recent, inputs[0].mean((0, 2, 3)), rtol=0.02) and source is not None
    fractions = (first.running_mean - source) / (recent - source)
    assert torch.allclose(fractions, fractions[0].expand(8)) and 0.5 * model.fraction < fractions[0] <= model.fraction


def test_cotta_restores_and_waits_for_boxes() -> None:
    net = make_double().float()
    model = ctta.detect(net, "cotta", restore=1.0, min_threshold=0.3, batch_stats=0.0)
    assert isinstance(model, BoxCoTTA)
    model.thresholds.fill_(0.3)
    model(make_images(0).float())
    assert model.last_step is not None and model.last_step.updated
    pairs = zip(model.student.parameters(), model.source.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    model = ctta.detect(make_yolo(spread=0.0), "cotta")
    model(make_images(0).float())
    assert model.last_step is None, "without a box above a threshold nothing is learned"


def test_answers_are_boxes_of_each_image() -> None:
    detector = make_detector()
    for name in ("source", "bn_stats", "shift_statistics", "cotta"):
        model = ctta.detect(detector, name)
        found = model(torch.rand(2, 3, 60, 90))
        assert len(found) == 2 and len(model.predict_once(torch.rand(1, 3, 60, 90))) == 1
        for each in found:
            assert 0 < len(each["boxes"]) <= 8 and each["labels"].dtype == torch.int64
            assert (each["boxes"][:, 2] < 90.01).all() and (each["boxes"][:, 3] < 60.01).all()
            assert (each["scores"].diff() <= 0).all()
        assert model(torch.rand(0, 3, 60, 90)) == []


def test_saved_streams_load_by_name(tmp_path: Any) -> None:
    detector = make_detector()
    for name in ("shift_statistics", "cotta"):
        model = ctta.detect(detector, name)
        model(torch.rand(2, 3, 64, 64))
        ctta.save(model, tmp_path / "stream.safetensors")
        loaded = ctta.load(tmp_path / "stream.safetensors", detector)
        assert type(loaded) is DETECTION_METHODS[name]
        x = torch.rand(2, 3, 64, 64)
        for one, other in zip(loaded(x), model(x), strict=True):
            assert torch.equal(one["boxes"], other["boxes"])


def test_deployed_networks_predict_what_was_learned() -> None:
    net, x = make_double(), make_images(5)
    for name in ("shift_statistics", "cotta", "whw", "actmad"):
        settings: dict[str, Any] = {}
        if name in ("whw", "actmad"):
            settings = {"source_stats": detection_stats(net, [make_images(-1), make_images(-2)])}
        model = ctta.detect(net, name, **settings)
        model(make_images(1))
        deployed = model.deploy()
        assert isinstance(deployed, YOLOv5Detector)
        if name == "cotta":
            continue  # its answers are merged over views
        for one, other in zip(deployed.predict(x), model.predict_once(x), strict=True):
            if name == "shift_statistics":  # weighs the batch anew
                assert len(one["boxes"]) > 0
            else:
                assert torch.allclose(one["boxes"], other["boxes"])


def test_refusals() -> None:
    detector = make_detector()
    with pytest.raises(ConfigError, match="method must be one of"):
        ctta.detect(detector, "tent")
    with pytest.raises(ConfigError, match="not a known detector"):
        ctta.detect(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="detection_stats"):
        ctta.detect(detector, "actmad")
    with pytest.raises(InputError, match="RGB images"):
        ctta.detect(detector)(torch.rand(2, 1, 32, 32))
    with pytest.raises(ConfigError, match="GuardedDetector"):
        ctta.Guarded(ctta.detect(detector))
    with pytest.raises(ConfigError, match="not compiled"):
        ctta.detect(detector).compile()
    stats = detection_stats(detector, [torch.rand(2, 3, 64, 64)])
    with pytest.raises(InputError, match="two or more images"):
        ctta.detect(detector, "actmad", source_stats=stats)(torch.rand(1, 3, 64, 64))
    with pytest.raises(InputError, match="images of one size"):
        ctta.detect(detector, "actmad", source_stats=stats)(torch.rand(2, 3, 96, 96))
    with pytest.raises(InputError, match="two source images or more, got 0"):
        detection_stats(detector, [])


# ---- guard ----


def guard_whw(**settings: Any) -> tuple[GuardedDetector, WHW]:
    net = make_yolo(num_classes=3)
    stats = detection_stats(net, [torch.rand(4, 3, 64, 64) for _ in range(2)])
    method = ctta.detect(net, "whw", source_stats=stats, lr=1e-6)
    assert isinstance(method, WHW)
    return GuardedDetector(method, inspect_every=1, **settings), method


def shift_objectness_(model: GuardedDetector, shift: float) -> None:
    student = model.wrapped.student
    assert isinstance(student, YOLOv5Detector)
    for layer in student.net.head.m:
        assert isinstance(layer, nn.Conv2d) and layer.bias is not None
        layer.bias.data.view(3, -1)[:, 4] += shift


def test_guard_lets_a_healthy_stream_pass() -> None:
    torch.manual_seed(0)
    model, method = guard_whw()
    alone = method.fork()
    for seed in range(4):
        x = make_images(seed, 2).float()
        for one, other in zip(model(x), alone(x), strict=True):
            assert torch.equal(one["boxes"], other["boxes"])
    assert model.collapse_score < 1 and not model.events
    assert len(model.predict(x)) == len(model.predict_once(x)) == 2


@pytest.mark.parametrize("shift", [-30.0, 30.0], ids=["no boxes", "boxes everywhere"])
def test_guard_undoes_a_collapse(shift: float) -> None:
    torch.manual_seed(0)
    model, _ = guard_whw()
    if shift > 0:  # a source that finds little
        quiet = make_yolo(num_classes=3)
        for layer in quiet.head.m:
            assert isinstance(layer, nn.Conv2d) and layer.bias is not None
            layer.bias.data.view(3, -1)[:, 4] -= 12
        stats = detection_stats(quiet, [torch.rand(4, 3, 64, 64) for _ in range(2)])
        model = GuardedDetector(ctta.detect(quiet, "whw", source_stats=stats, lr=1e-6), inspect_every=1)
    healthy = [model(make_images(seed, 4).float()) for seed in range(3)]
    shift_objectness_(model, shift)
    x = make_images(3, 4).float()
    found = model(x)
    assert model.events and model.events[-1].kind == EventKind.ROLLBACK and model.health.answered_by_source
    expected = ctta.detect(model.source, "source")(x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["boxes"], other["boxes"])
    assert len(healthy) == 3
    assert len(model(x)[0]["boxes"]) == len(expected[0]["boxes"]), "the snapshot predicts again"


def test_empty_scenes_are_no_alarm() -> None:
    torch.manual_seed(0)
    net = make_yolo(num_classes=3)
    for layer in net.head.m:
        assert isinstance(layer, nn.Conv2d) and layer.bias is not None
        layer.bias.data.view(3, -1)[:, 4] -= 40
    model = GuardedDetector(ctta.detect(net), inspect_every=1)
    for seed in range(5):
        assert all(len(each["boxes"]) == 0 for each in model(make_images(seed, 2).float()))
    assert not model.events and model.collapse_score < 1


def test_guarded_streams_load(tmp_path: Any) -> None:
    detector = make_detector()
    model = GuardedDetector(ctta.detect(detector))
    x = torch.rand(2, 3, 64, 64)
    model(x)
    ctta.save(model, tmp_path / "stream.safetensors")
    loaded = ctta.load(tmp_path / "stream.safetensors", detector)
    assert isinstance(loaded, GuardedDetector)
    for one, other in zip(loaded(x), model(x), strict=True):
        assert torch.equal(one["boxes"], other["boxes"])
    assert isinstance(model.fork(), GuardedDetector)
    with pytest.raises(ConfigError, match=r"use ctta\.guard\.Guarded"):
        GuardedDetector(ctta.Tent(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))))
