"""A method on a stream of label maps: the figures, what cannot be scored, and going on after an interruption."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.datasets.base import IGNORE_INDEX
from ctta.datasets.segmentation import CLASS_NAMES
from ctta.evaluation.metrics import MIOU, PixelScore
from ctta.evaluation.results import BatchRecord, read_result
from ctta.streams import Segment, Stream, mixed

SIZE, FULL = (6, 10), (12, 20)  # of pictures and of label maps


@dataclass(frozen=True)
class Scenes:
    """Random scenes; the label maps are twice as large as the pictures."""

    name: str
    num_classes: int = 4
    ignored: tuple[int, ...] = ()  # scenes without a labelled pixel

    labels = None

    def __len__(self) -> int:
        return 5

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        pictures, maps = [], []
        for row in rows.tolist():
            generator = torch.Generator().manual_seed(len(self.name) * 100 + row)
            pictures.append(torch.rand(3, *SIZE, generator=generator))
            labels = torch.randint(self.num_classes, FULL, generator=generator)
            labels[torch.rand(FULL, generator=generator) < 0.2] = IGNORE_INDEX
            maps.append(torch.full_like(labels, IGNORE_INDEX) if row in self.ignored else labels)
        return torch.stack(pictures), torch.stack(maps)


class Named(Scenes):
    """Scenes of a data set that has names for its classes."""

    class_names = ("road", "sky", "car", "tree")


def net(num_classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, num_classes, 1)).eval()


def cotta() -> ctta.CoTTA:
    views = ctta.views.multiscale_flip((1.0, 2.0))
    return ctta.CoTTA(net(), views=views, gate="element", average="probabilities", loss="hard", seed=3)


def stream(*scenes: Scenes, batch_size: int = 2) -> Stream:
    domains = scenes or (Scenes("fog"), Scenes("night"))
    segments = [Segment(images.name, images, np.arange(len(images))) for images in domains]
    return Stream("scenes", segments, batch_size=batch_size)


def timeless(batches: tuple[BatchRecord, ...]) -> list[BatchRecord]:
    return [replace(batch, seconds=0.0, peak_mib=0) for batch in batches]


def test_figures_equal_a_plain_loop() -> None:
    result = ctta.evaluate(ctta.Tent(net()), stream())
    model = ctta.Tent(net())
    matrices = {domain: np.zeros((4, 4), int) for domain in ("fog", "night")}
    for batch in stream():
        full = torch.nn.functional.interpolate(model(batch.x), FULL, mode="bilinear")
        assert batch.y is not None
        for truth, predicted in zip(batch.y.flatten().tolist(), full.argmax(1).flatten().tolist(), strict=True):
            if truth != 255:
                matrices[batch.domain][truth, predicted] += 1

    def ious(matrix: np.ndarray) -> np.ndarray:
        return matrix.diagonal() / (matrix.sum(0) + matrix.sum(1) - matrix.diagonal())

    mious = [ious(matrix).mean() for matrix in matrices.values()]
    assert result.metric == MIOU
    assert result.mious == result.values == pytest.approx(mious)
    assert result.miou == result.value == pytest.approx(np.mean(mious))
    assert list(result.class_iou.values()) == pytest.approx(ious(sum(matrices.values())).tolist())
    assert result.errors == pytest.approx([1 - matrix.trace() / matrix.sum() for matrix in matrices.values()])
    assert result.worst == (("fog", "night")[int(np.argmin(mious))], min(result.mious))
    assert result.total.count == 10
    assert 0 < result.calibration_error < 1


def test_classes_have_the_names_of_the_data_set() -> None:
    assert list(ctta.evaluate(ctta.Source(net()), stream()).class_iou) == ["class 0", "class 1", "class 2", "class 3"]
    named = stream(Named("fog"), Named("night"))
    assert list(ctta.evaluate(ctta.Source(net()), named).class_iou) == ["road", "sky", "car", "tree"]
    assert list(ctta.evaluate(ctta.Source(net()), mixed(named)).class_iou) == ["road", "sky", "car", "tree"]
    nineteen = ctta.evaluate(ctta.Source(net(19)), stream(Scenes("fog", num_classes=19)))
    assert tuple(nineteen.class_iou) == CLASS_NAMES


def test_an_interrupted_evaluation_goes_on_to_the_same_result(tmp_path: Path) -> None:
    whole = ctta.evaluate(cotta(), stream(Named("fog"), Named("night")))

    def stop(record: BatchRecord) -> None:
        raise InterruptedError

    for _ in range(4):
        with pytest.raises(InterruptedError):
            ctta.evaluate(cotta(), stream(Named("fog"), Named("night")), folder=tmp_path, on_batch=stop)
    seen: list[BatchRecord] = []
    resumed = ctta.evaluate(cotta(), stream(Named("fog"), Named("night")), folder=tmp_path, on_batch=seen.append)
    assert len(seen) == 2  # of six
    assert timeless(resumed.batches) == timeless(whole.batches)
    assert read_result(tmp_path) == resumed
    assert read_result(tmp_path).class_iou == whole.class_iou


def test_a_scene_without_labelled_pixels_does_not_count_and_a_domain_without_is_refused(tmp_path: Path) -> None:
    some = ctta.evaluate(ctta.Source(net()), stream(Scenes("fog", ignored=(0, 1))))
    first, *_ = (batch.score for batch in some.batches)
    assert isinstance(first, PixelScore) and first.num_pixels == 0
    rest = stream().with_segments("rest", [Segment("fog", Scenes("fog"), np.arange(2, 5))])
    assert some.mious == pytest.approx(ctta.evaluate(ctta.Source(net()), rest).mious)
    nothing = stream(Scenes("fog"), Scenes("night", ignored=(0, 1, 2, 3, 4)), Scenes("rain"))
    with pytest.raises(ValueError, match="night has no labeled pixel in 5 images"):
        ctta.evaluate(ctta.Source(net()), nothing, folder=tmp_path)
    assert len(read_result(tmp_path).batches) == 5  # the night was not gone through to its end, and rain not begun


def test_a_model_for_other_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model has 6 classes, but the dataset has 4 \(road, sky, car, \.\.\.\)"):
        ctta.evaluate(ctta.Source(net(6)), stream(Named("fog")))
    with pytest.raises(ValueError, match="model has 3 classes"):
        ctta.evaluate(ctta.Source(net(3)), stream())
    one_answer_per_image = nn.Sequential(net(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match=r"label maps .* got \(2, 4\) and \(2, 12, 20\)"):
        ctta.evaluate(ctta.Source(one_answer_per_image), stream())


def test_results_of_images_have_no_miou() -> None:
    images = np.zeros((4, 6, 10, 3), np.uint8)
    pooled = nn.Sequential(net(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = ctta.streams.in_memory(images, [0, 1, 2, 3], name="black")
    result = ctta.evaluate(ctta.Source(pooled), data)
    assert (result.metric.key, result.value) == ("error", result.error)
    with pytest.raises(ValueError, match="one label per image"):
        _ = result.miou
