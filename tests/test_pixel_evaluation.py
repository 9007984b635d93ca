"""Evaluation on label maps: metrics, streams that cannot be scored, and resuming."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_scenes import FULL, NamedScenes, RandomScenes, make_cotta, make_net, make_stream
from torch import nn

import ctta
from ctta.data.datasets.scenes import CLASS_NAMES
from ctta.data.streams import Segment, mixed
from ctta.errors import ConfigError, DataError, InputError
from ctta.evaluation import BatchRecord, read_result
from ctta.evaluation.metrics import MIOU, PixelScore


def without_costs(batches: tuple[BatchRecord, ...]) -> list[BatchRecord]:
    return [replace(batch, seconds=0.0, peak_mib=0) for batch in batches]


def test_metrics_equal_a_plain_loop() -> None:
    result = ctta.evaluate(ctta.Tent(make_net()), make_stream())
    model = ctta.Tent(make_net())
    matrices = {domain: np.zeros((4, 4), int) for domain in ("fog", "night")}
    for batch in make_stream():
        full = torch.nn.functional.interpolate(model(batch.x), FULL, mode="bilinear")
        assert batch.y is not None
        for truth, predicted in zip(batch.y.flatten().tolist(), full.argmax(1).flatten().tolist(), strict=True):
            if truth != 255:
                matrices[batch.domain][truth, predicted] += 1

    def ious(matrix: NDArray[Any]) -> NDArray[Any]:
        values: NDArray[Any] = matrix.diagonal() / (matrix.sum(0) + matrix.sum(1) - matrix.diagonal())
        return values

    mious = [ious(matrix).mean() for matrix in matrices.values()]
    assert result.metric == MIOU
    assert result.mious == result.values == pytest.approx(mious)
    assert result.miou == result.value == pytest.approx(np.mean(mious))
    assert list(result.class_iou.values()) == pytest.approx(ious(np.sum(list(matrices.values()), axis=0)).tolist())
    assert result.errors == pytest.approx([1 - matrix.trace() / matrix.sum() for matrix in matrices.values()])
    assert result.worst == (("fog", "night")[int(np.argmin(mious))], min(result.mious))
    assert result.total.num_images == 10
    assert 0 < result.calibration_error < 1


def test_classes_have_the_names_of_the_dataset() -> None:
    assert list(ctta.evaluate(ctta.Source(make_net()), make_stream()).class_iou) == [
        "class 0",
        "class 1",
        "class 2",
        "class 3",
    ]
    named = make_stream(NamedScenes("fog"), NamedScenes("night"))
    assert list(ctta.evaluate(ctta.Source(make_net()), named).class_iou) == ["road", "sky", "car", "tree"]
    assert list(ctta.evaluate(ctta.Source(make_net()), mixed(named)).class_iou) == ["road", "sky", "car", "tree"]
    nineteen = ctta.evaluate(ctta.Source(make_net(19)), make_stream(RandomScenes("fog", num_classes=19)))
    assert tuple(nineteen.class_iou) == CLASS_NAMES


def test_interrupted_evaluation_resumes_to_the_same_result(tmp_path: Path) -> None:
    whole = ctta.evaluate(make_cotta(), make_stream(NamedScenes("fog"), NamedScenes("night")))

    def stop(record: BatchRecord) -> None:
        raise InterruptedError

    for _ in range(4):
        with pytest.raises(InterruptedError):
            ctta.evaluate(
                make_cotta(), make_stream(NamedScenes("fog"), NamedScenes("night")), folder=tmp_path, on_batch=stop
            )
    seen: list[BatchRecord] = []
    resumed = ctta.evaluate(
        make_cotta(), make_stream(NamedScenes("fog"), NamedScenes("night")), folder=tmp_path, on_batch=seen.append
    )
    assert len(seen) == 2  # of six
    assert without_costs(resumed.batches) == without_costs(whole.batches)
    assert read_result(tmp_path) == resumed
    assert read_result(tmp_path).class_iou == whole.class_iou


def test_scene_without_labeled_pixels_is_left_out_and_a_domain_without_is_refused(tmp_path: Path) -> None:
    some = ctta.evaluate(ctta.Source(make_net()), make_stream(RandomScenes("fog", ignored=(0, 1))))
    first, *_ = (batch.score for batch in some.batches)
    assert isinstance(first, PixelScore) and first.num_pixels == 0
    rest = make_stream().with_segments("rest", [Segment("fog", RandomScenes("fog"), np.arange(2, 5))])
    assert some.mious == pytest.approx(ctta.evaluate(ctta.Source(make_net()), rest).mious)
    nothing = make_stream(RandomScenes("fog"), RandomScenes("night", ignored=(0, 1, 2, 3, 4)), RandomScenes("rain"))
    with pytest.raises(DataError):
        ctta.evaluate(ctta.Source(make_net()), nothing, folder=tmp_path)
    assert len(read_result(tmp_path).batches) == 5  # the last batch of night is missing, and rain was not begun


def test_model_for_other_classes_is_refused() -> None:
    with pytest.raises(ConfigError):
        ctta.evaluate(ctta.Source(make_net(6)), make_stream(NamedScenes("fog")))
    with pytest.raises(InputError):
        ctta.evaluate(ctta.Source(make_net(3)), make_stream())
    one_prediction_per_image = nn.Sequential(make_net(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(InputError):
        ctta.evaluate(ctta.Source(one_prediction_per_image), make_stream())


def test_results_of_image_classification_have_no_miou() -> None:
    images = np.zeros((4, 6, 10, 3), np.uint8)
    pooled = nn.Sequential(make_net(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = ctta.data.streams.in_memory(images, [0, 1, 2, 3], name="black")
    result = ctta.evaluate(ctta.Source(pooled), data)
    assert (result.metric.key, result.value) == ("error", result.error)
    with pytest.raises(InputError):
        _ = result.miou
