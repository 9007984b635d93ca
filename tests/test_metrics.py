"""Metrics of images: error and calibration against plain arithmetic, image by image."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctta.errors import InputError
from ctta.evaluation.metrics import NUM_BINS, Score, score_batch, score_images


def naive(logits: list[list[float]], labels: list[int]) -> tuple[float, float]:
    """Compute error and ECE with one loop over images and one over bins."""
    predictions = []
    for row, label in zip(logits, labels, strict=True):
        weights = [math.exp(value - max(row)) for value in row]
        predicted = max(range(len(row)), key=lambda index: row[index])
        predictions.append((weights[predicted] / sum(weights), predicted == label))
    error = sum(not right for _, right in predictions) / len(predictions)
    gap = 0.0
    for number in range(NUM_BINS):
        low, high = number / NUM_BINS, (number + 1) / NUM_BINS
        inside = [(certainty, right) for certainty, right in predictions if low < certainty <= high]
        if inside:
            confidence = sum(certainty for certainty, _ in inside) / len(inside)
            accuracy = sum(right for _, right in inside) / len(inside)
            gap += len(inside) / len(predictions) * abs(confidence - accuracy)
    return error, gap


@given(st.integers(1, 60), st.integers(2, 7), st.integers(0, 10_000))
def test_error_and_calibration_equal_a_naive_count(count: int, num_classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (count,), generator=generator)
    score = score_batch(logits, labels)
    error, gap = naive(logits.tolist(), labels.tolist())
    assert score.error == error
    assert score.calibration_error == pytest.approx(gap, abs=1e-12)
    assert score.confidence == pytest.approx(float(logits.softmax(1).amax(1).mean()), abs=1e-12)


def test_scores_of_batches_add_up() -> None:
    logits, labels = torch.randn(50, 4), torch.randint(4, (50,))
    whole = score_images(logits, labels)
    parts = Score.sum(score_images(x, y) for x, y in zip(logits.split(7), labels.split(7), strict=True))
    assert (parts.num_images, parts.num_wrong) == (whole.num_images, whole.num_wrong)
    assert parts.calibration_error == pytest.approx(whole.calibration_error, abs=1e-12)


def test_certain_and_correct_predictions_are_perfectly_calibrated() -> None:
    score = score_batch(torch.tensor([[800.0, 0.0], [0.0, 800.0]]), torch.tensor([0, 1]))
    assert (score.error, score.calibration_error, score.confidence) == (0, 0, 1)


def test_non_finite_prediction_is_wrong() -> None:
    score = score_images(torch.tensor([[math.nan, 1.0], [1.0, math.inf], [1.0, 0.0]]), torch.tensor([0, 1, 0]))
    assert score.num_wrong == 2
    assert score.calibration_error == pytest.approx((1 - math.exp(1) / (1 + math.exp(1))) / 3)


@pytest.mark.parametrize("labels", [torch.tensor([0, 10]), torch.tensor([-1, 0])])
def test_labels_out_of_range_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(InputError):
        score_batch(torch.zeros(2, 10), labels)


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(InputError):
        score_batch(torch.zeros(2, 10), torch.zeros(3, dtype=torch.long))
