"""Every method for detectors on a device that is not the CPU, with the CPU's boxes; see accelerator/."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import accelerator
import pytest
import torch
from test_detection_methods import make_yolo
from torch import Tensor

import ctta
from ctta.benchmark.detection import run_street_detection
from ctta.detection import (
    DETECTION_METHODS,
    Boxes,
    DetectionModel,
    YOLOv5Detector,
    detect,
    detection_stats,
    draw_street_batches,
    street_detector,
    unpack,
)
from ctta.detection.boxes import fuse_boxes, move_boxes
from ctta.evaluation.boxes import run_detection, score_boxes
from ctta.guard.boxes import GuardedDetector
from ctta.source_stats import SourceStats

#: Settings with which every method learns from every batch.
SETTINGS: dict[str, dict[str, Any]] = {
    "actmad": {"per": "channel"},
    "cotta": {"min_threshold": 0.0, "threshold_decay": 0.5, "scales": (0.5,)},
    "whw": {"always": True},
}
#: The most times that the host waits for the device in a step on any number of images.
HOST_READS = {"source": 5, "bn_stats": 5, "shift_statistics": 18, "actmad": 7, "cotta": 14, "whw": 11}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def numbers_of_cpu() -> Iterator[None]:
    with accelerator.numbers_of_cpu():
        yield


@cache
def make_stream(batch_size: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(batch_size, 3, 64, 64, generator=generator) for _ in range(3)]


def make_detector(device: str = "cpu") -> YOLOv5Detector:
    torch.manual_seed(0)
    return YOLOv5Detector(make_yolo(), max_detections=8).to(device)


@cache
def make_stats() -> SourceStats:
    return detection_stats(make_detector(), make_stream())


def make_model(method: str, device: str, **settings: Any) -> DetectionModel:
    stats = {"source_stats": make_stats()} if method in ("actmad", "whw") else {}
    return detect(make_detector(device), method, **stats, **SETTINGS.get(method, {}), **settings)


def run(model: Any, stream: list[Tensor]) -> list[list[Boxes]]:
    device = next(model.parameters()).device
    answers = [model(x.to(device)) for x in stream]
    assert all(value.device == device for answer in answers for each in answer for value in each.values())
    return [move_boxes(answer, CPU) for answer in answers]


def assert_equal(found: list[list[Boxes]], expected: list[list[Boxes]]) -> None:
    for batch, other in zip(found, expected, strict=True):
        for one, two in zip(batch, other, strict=True):
            assert all(torch.equal(one[name], two[name]) for name in ("boxes", "scores", "labels"))
    assert any(len(each["boxes"]) for batch in expected for each in batch)


@pytest.mark.parametrize("method", DETECTION_METHODS)
def test_paths(method: str, tmp_path: Path) -> None:
    """Adapt, fork, reset, save and load both ways, deploy, and adapt again under a guard."""
    stream = make_stream()
    on_cpu, model = make_model(method, "cpu"), make_model(method, "sim")
    expected = run(on_cpu, stream)
    assert_equal(run(model, stream[:1]), expected[:1])
    fork = model.fork()
    assert_equal(run(fork, stream[:1]), expected[:1])
    ctta.save(model, tmp_path / "device.safetensors")
    assert_equal(run(ctta.load(tmp_path / "device.safetensors", make_detector()), stream[1:]), expected[1:])
    assert_equal(run(ctta.load(tmp_path / "device.safetensors", make_detector("sim")), stream[1:]), expected[1:])
    assert_equal(run(model, stream[1:]), expected[1:])
    with torch.no_grad():
        assert torch.equal(model.deploy()(stream[0].to("sim")).cpu(), on_cpu.deploy()(stream[0]))
    assert_equal(run(model.reset(), stream[:1]), expected[:1])
    ctta.save(on_cpu.reset(), tmp_path / "cpu.safetensors")
    assert_equal(run(ctta.load(tmp_path / "cpu.safetensors", make_detector("sim")), stream), expected)


@pytest.mark.parametrize("method", DETECTION_METHODS)
def test_guard(method: str) -> None:
    stream = make_stream()
    expected, found = (run(GuardedDetector(make_model(method, device)), stream) for device in ("cpu", "sim"))
    assert_equal(found, expected)


@pytest.mark.parametrize("method", DETECTION_METHODS)
def test_16_bits(method: str) -> None:
    expected, found = (run(make_model(method, device, amp="bf16"), make_stream()) for device in ("cpu", "sim"))
    assert_equal(found, expected)
    assert all(each["boxes"].dtype == torch.float32 for each in found[0])


def test_statistics_of_host_batches() -> None:
    found = detection_stats(make_detector("sim"), make_stream())
    assert found.tensors.keys() == make_stats().tensors.keys()
    for name, value in make_stats().tensors.items():
        torch.testing.assert_close(found.tensors[name].cpu(), value)


def test_runs_are_scored_on_the_host() -> None:
    stream = make_stream()
    targets = [Boxes(boxes=torch.tensor([[4.0, 4.0, 40.0, 40.0]]), labels=torch.tensor([1]))] * 2
    runs = []
    for device in ("cpu", "sim"):
        models: dict[str, Any] = {"model": make_model("shift_statistics", device), "function": make_detector().predict}
        runs.append(run_detection(models, [(x, targets, "drawn") for x in stream]))
    assert [each.score() for each in runs[0].values()] == [each.score() for each in runs[1].values()]
    found = make_detector("sim").predict(stream[0].to("sim"))
    assert score_boxes(found, targets) == score_boxes(move_boxes(found, CPU), targets)


def test_streets() -> None:
    results = [
        run_street_detection(("source", "shift_statistics"), ("clear",), num_frames=4, device=device, amp="bf16")
        for device in ("cpu", "auto")
    ]
    for name, expected in results[0].runs.items():
        assert_equal([list(results[1].runs[name].found)], [list(expected.found)])


@cache
def draw_batches(batch_size: int) -> list[Tensor]:
    return [x for x, _, _ in draw_street_batches(["clear"], 4 * batch_size, batch_size=batch_size, split="choose")]


@cache
def make_street_stats() -> SourceStats:
    return detection_stats(street_detector(), draw_batches(2))


@pytest.mark.parametrize("method", DETECTION_METHODS)
def test_host_reads(method: str) -> None:
    """They do not depend on how many images, boxes and layers there are; a default detector that finds boxes."""
    stats = {"source_stats": make_street_stats()} if method in ("actmad", "whw") else {}
    choices: dict[str, dict[str, Any]] = {
        "whw": {"always": True},
        "cotta": {"min_threshold": 0.2, "threshold_decay": 0.5},
    }
    settings = choices.get(method, {})
    for batch_size in (2, 4):
        model = detect(street_detector().to("sim"), method, **stats, **settings)
        first, *_, last = (x.to("sim") for x in draw_batches(batch_size))
        reads = []
        for x in (first, last, first, last):  # the first steps allocate
            with accelerator.count() as counts:
                model(x)
            reads.append(counts.host_reads)
        assert model.optimizer is None or (model.last_step is not None and model.last_step.updated)
        assert max(reads[2:]) <= HOST_READS[method], f"the host read {reads} times"


def test_boxes_are_read_and_fused_at_once() -> None:
    packed = make_detector("sim")(make_stream(6)[0].to("sim"))
    with accelerator.count() as counts:
        found = unpack(packed)
    assert counts.host_reads == 1
    with accelerator.count() as counts:
        fuse_boxes([found[0], found[1]])
    assert counts.host_reads == 1
