"""Metrics of pixels: mIoU, IoU of each class, accuracy and calibration against loops over pixels."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ctta.data.datasets import IGNORE_INDEX
from ctta.errors import InputError
from ctta.evaluation.metrics import NUM_BINS, PixelScore, Score, score_batch, score_from_json

Grid = list[list[float]]


def resize_plane(plane: Grid, height: int, width: int) -> Grid:
    """Resize bilinearly, keeping the outer corners of the corner pixels in place (``align_corners=False``)."""

    def neighbors(index: int, new: int, old: int) -> tuple[int, int, float]:
        source = max(0.0, (index + 0.5) * old / new - 0.5)
        low = min(int(source), old - 1)
        return low, min(low + 1, old - 1), source - low

    result = []
    for y in range(height):
        top, bottom, down = neighbors(y, height, len(plane))
        row = []
        for x in range(width):
            left, right, along = neighbors(x, width, len(plane[0]))
            upper = plane[top][left] * (1 - along) + plane[top][right] * along
            lower = plane[bottom][left] * (1 - along) + plane[bottom][right] * along
            row.append(upper * (1 - down) + lower * down)
        result.append(row)
    return result


class NaiveScore:
    """Metrics from two lists of pixels, with a set of pixels for every class."""

    def __init__(self, logits: Tensor, labels: Tensor) -> None:
        num_classes, height, width = logits.shape[1], *labels.shape[1:]
        self.truth: list[int] = []
        self.predictions: list[tuple[int, float]] = []
        for image, channels in zip(labels.tolist(), logits.tolist(), strict=True):
            planes = [resize_plane(plane, height, width) for plane in channels]
            for y in range(height):
                for x in range(width):
                    if image[y][x] != 255:
                        values = [plane[y][x] for plane in planes]
                        best = max(range(num_classes), key=lambda index: values[index])
                        weights = [math.exp(value - values[best]) for value in values]
                        self.truth.append(image[y][x])
                        self.predictions.append((best, 1 / sum(weights)))
        self.iou: list[float | None] = []
        for number in range(num_classes):
            labeled = {index for index, label in enumerate(self.truth) if label == number}
            predicted = {index for index, (label, _confidence) in enumerate(self.predictions) if label == number}
            union = labeled | predicted
            self.iou.append(len(labeled & predicted) / len(union) if union else None)
        present = [iou for iou in self.iou if iou is not None]
        self.miou = sum(present) / len(present) if present else math.nan
        self.correct = [label == best for label, (best, _confidence) in zip(self.truth, self.predictions, strict=True)]

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)

    @property
    def calibration_error(self) -> float:
        gap = 0.0
        for number in range(NUM_BINS):
            inside = [
                (confidence, correct)
                for (_label, confidence), correct in zip(self.predictions, self.correct, strict=True)
                if number / NUM_BINS < confidence <= (number + 1) / NUM_BINS
            ]
            gap += abs(sum(confidence for confidence, _ in inside) - sum(correct for _, correct in inside))
        return gap / len(self.correct)


def random_scenes(
    seed: int, count: int, num_classes: int, size: tuple[int, int], full: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return logits and label maps; some pixels are ignored, the last class is never labeled and rarely predicted."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, num_classes, *size, generator=generator, dtype=torch.float64)
    logits[:, -1] -= 6
    labels = torch.randint(num_classes - 1, (count, *full), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
    labels[0, 0, 0] = 0
    return logits, labels


@given(
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.integers(2, 6),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 3),
)
def test_metrics_equal_loops_over_pixels(
    seed: int, count: int, num_classes: int, size: tuple[int, int], factor: int
) -> None:
    full = (size[0] * factor, size[1] * factor + factor // 2)
    logits, labels = random_scenes(seed, count, num_classes, size, full)
    score, naive = score_batch(logits, labels), NaiveScore(logits, labels)
    assert isinstance(score, PixelScore)
    assert score.class_iou == pytest.approx(naive.iou)
    assert score.miou == score.value == pytest.approx(naive.miou)
    assert score.pixel_accuracy == naive.accuracy
    assert score.error == 1 - naive.accuracy
    assert score.calibration_error == pytest.approx(naive.calibration_error, abs=1e-9)
    assert score.confidence == pytest.approx(
        sum(confidence for _, confidence in naive.predictions) / len(naive.predictions)
    )
    assert (score.num_images, score.num_pixels) == (count, len(naive.truth))


def test_maps_are_scored_at_the_resolution_of_the_labels() -> None:
    """Logits are resized before the argmax: the border lies where the lines cross, not half-way between pixels."""
    logits = torch.zeros(1, 2, 1, 2)
    logits[0, 0, 0] = torch.tensor([9.0, 0.0])
    logits[0, 1, 0] = torch.tensor([0.0, 1.0])
    labels = torch.tensor([[[0] * 7 + [1]] * 2])
    score = score_batch(logits, labels)
    assert isinstance(score, PixelScore)
    # Along eight pixels class 0 falls from 9 to 0 and class 1 grows from 0 to 1, which meet at 0.9 of the way.
    assert score.num_predicted == (12, 4)
    assert score.class_iou == (12 / 14, 2 / 4)


def test_mean_leaves_out_absent_classes_but_not_predicted_ones() -> None:
    logits = torch.full((1, 4, 1, 4), -5.0)
    for column, predicted in enumerate((0, 0, 1, 2)):
        logits[0, predicted, 0, column] = 5
    score = score_batch(logits, torch.tensor([[[0, 0, 1, 1]]]))
    assert isinstance(score, PixelScore)
    assert score.class_iou == (1, 0.5, 0, None)
    assert score.miou == 0.5


def test_predictions_of_ignored_pixels_do_not_matter() -> None:
    logits, labels = random_scenes(0, 2, 5, (6, 8), (6, 8))
    before = score_batch(logits, labels)
    logits[(labels == IGNORE_INDEX)[:, None].expand_as(logits)] = math.nan
    assert score_batch(logits, labels) == before


def test_scores_of_batches_add_up() -> None:
    logits, labels = random_scenes(1, 7, 5, (4, 6), (8, 12))
    whole = score_batch(logits, labels)
    parts = Score.sum(score_batch(x, y) for x, y in zip(logits.split(2), labels.split(2), strict=True))
    assert isinstance(whole, PixelScore) and isinstance(parts, PixelScore)
    assert (parts.num_images, parts.num_labeled, parts.num_predicted, parts.num_correct) == (
        whole.num_images,
        whole.num_labeled,
        whole.num_predicted,
        whole.num_correct,
    )
    assert parts.miou == whole.miou
    assert parts.calibration_error == pytest.approx(whole.calibration_error, abs=1e-12)


def test_score_survives_json() -> None:
    for batch in (random_scenes(2, 2, 5, (4, 6), (8, 12)), (torch.randn(9, 4), torch.randint(4, (9,)))):
        score = score_batch(*batch)
        assert score_from_json(json.loads(json.dumps(score.to_json()))) == score


def test_names_in_files_stay_those_of_version_0_1() -> None:
    pixels = score_batch(*random_scenes(2, 2, 5, (4, 6), (8, 12)))
    images = score_batch(torch.randn(9, 4), torch.randint(4, (9,)))
    assert list(pixels.to_json()) == ["count", "labelled", "predicted", "right", "bins"]
    assert list(images.to_json()) == ["count", "wrong", "bins", "classes"]


def test_batch_without_labeled_pixels_adds_nothing() -> None:
    logits, labels = random_scenes(3, 2, 5, (4, 6), (4, 6))
    known, nothing = score_batch(logits, labels), score_batch(logits, torch.full_like(labels, IGNORE_INDEX))
    assert isinstance(known, PixelScore) and isinstance(nothing, PixelScore)
    assert nothing.num_pixels == 0 and nothing.class_iou == (None,) * 5
    assert all(math.isnan(value) for value in (nothing.miou, nothing.pixel_accuracy, nothing.error, nothing.confidence))
    both = known + nothing
    assert (both.miou, both.calibration_error, both.num_images) == (known.miou, known.calibration_error, 4)


def test_non_finite_prediction_is_wrong_and_of_no_class() -> None:
    logits = torch.zeros(1, 2, 1, 4)
    logits[0, 0] = 800
    logits[0, 1, 0, 0] = math.nan
    logits[0, 0, 0, 1] = math.inf
    score = score_batch(logits, torch.zeros(1, 1, 4, dtype=torch.uint8))
    assert isinstance(score, PixelScore)
    assert (score.num_labeled, score.num_predicted, score.num_correct) == ((4, 0), (2, 0), (2, 0))
    assert score.class_iou == (0.5, None)
    assert (score.confidence, score.calibration_error) == (0.5, 0)


def test_half_precision_is_converted_before_resizing() -> None:
    logits, labels = random_scenes(4, 1, 5, (6, 8), (36, 48))
    half = logits.bfloat16()
    assert score_batch(half, labels) == score_batch(half.float(), labels)


@pytest.mark.parametrize("label", [5, 254, -1, 300])
def test_labels_out_of_range_are_refused(label: int) -> None:
    labels = torch.zeros(1, 4, 6, dtype=torch.long)
    labels[0, 1, 2] = label
    with pytest.raises(InputError):
        score_batch(torch.zeros(1, 5, 4, 6), labels)


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        ((2, 5, 4, 6), (3, 4, 6), r"same images, got \(2, 5, 4, 6\) and \(3, 4, 6\)"),
        ((2, 5), (2, 4, 6), r"got \(2, 5\) and \(2, 4, 6\)"),
        ((2, 5, 4, 6), (2, 0, 6), r"got \(2, 5, 4, 6\) and \(2, 0, 6\)"),
        ((2, 5, 4, 6), (2, 12, 8), "swapped height and width.*transposed"),
        ((2, 5, 4, 6), (2,), r"label maps \(N, H, W\), got \(2, 5, 4, 6\) and \(2,\)"),
        ((2, 5, 4, 6), (2, 1, 4, 6), r"got \(2, 5, 4, 6\) and \(2, 1, 4, 6\)"),
    ],
)
def test_shapes_that_do_not_match_are_refused(
    predictions: tuple[int, ...], labels: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        score_batch(torch.zeros(predictions), torch.zeros(labels, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_labels_are_integers_of_any_type(dtype: torch.dtype) -> None:
    logits, labels = torch.rand(1, 5, 4, 6), torch.randint(5, (1, 4, 6))
    labels[0, 0] = 255
    assert score_batch(logits, labels.to(dtype)) == score_batch(logits, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_not_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="must hold integers"):
        score_batch(torch.zeros(1, 5, 4, 6), torch.zeros(1, 4, 6, dtype=dtype))
