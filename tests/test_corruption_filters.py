"""The numerical building blocks of the corruptions: random numbers, filters, resampling and edges."""

from typing import Literal

import numpy as np
import pytest
from PIL import Image
from random_images import random_images

from ctta.data.corruptions.arrays import PerImageRNG
from ctta.data.corruptions.blur import blur_along_lines, disk_kernel, glass_sources, line_weights
from ctta.data.corruptions.filters import correlate, downsample_box, find_equal_weights, reflect, upsample_nearest
from ctta.data.corruptions.noise import poisson_quantiles
from ctta.data.corruptions.weather import canny_edges, chamfer_distance, plasma


@pytest.mark.parametrize("height, width, fraction", [(32, 32, 0.65), (17, 33, 0.95), (48, 64, 0.75), (96, 96, 0.4)])
def test_box_downsampling_equals_that_of_pillow(height: int, width: int, fraction: float) -> None:
    images = random_images(3, height, width)
    small = int(height * fraction), int(width * fraction)
    ours = downsample_box(downsample_box(images, small[1], axis=2), small[0], axis=1)
    ours = upsample_nearest(upsample_nearest(ours, height, axis=1), width, axis=2)
    for image, result in zip(images, ours, strict=True):
        shrunk = Image.fromarray(image).resize(small[::-1], Image.Resampling.BOX)
        np.testing.assert_array_equal(result, shrunk.resize((width, height), Image.Resampling.BOX))


@pytest.mark.parametrize("height, width, reach", [(12, 12, 1), (13, 20, 2), (24, 17, 4)])
def test_glass_blur_equals_the_published_loop(height: int, width: int, reach: int) -> None:
    index = np.arange(5)
    sources = glass_sources(height, width, reach, PerImageRNG(0, "glass", 1, index))
    steps = PerImageRNG(0, "glass", 1, index).integers((2, (height - 2 * reach) * (width - 2 * reach)), -reach, reach)
    steps = steps.reshape(5, 2, height - 2 * reach, width - 2 * reach)
    assert steps.min() == -reach and steps.max() == reach - 1
    for image, expected in enumerate(np.arange(height * width).reshape(1, height, width).repeat(5, axis=0)):
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                down, right = steps[image, :, row - reach - 1, column - reach - 1]
                expected[row, column] = expected[row + down, column + right]
        np.testing.assert_array_equal(sources[image], expected.ravel())


@pytest.mark.parametrize("repeat_edge, mode", [(True, "symmetric"), (False, "reflect")])
def test_reflection_equals_that_of_numpy(repeat_edge: bool, mode: Literal["symmetric", "reflect"]) -> None:
    outside = np.arange(-30, 37, dtype=np.float32)
    np.testing.assert_array_equal(reflect(outside, 7, repeat_edge), np.pad(np.arange(7), 30, mode))


@pytest.mark.parametrize("radius, sigma", [(1.5, 0.1), (10, 0.5), (17.3, 0.9)])
def test_running_sums_equal_the_weighted_sum(radius: float, sigma: float) -> None:
    kernel = disk_kernel(radius, sigma)
    assert (len(find_equal_weights(kernel)) > radius) == (radius > 8)
    images = random_images(2, 40, 50)
    reach = len(kernel) // 2
    padded = np.pad(images, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect").astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape, axis=(1, 2))
    expected = np.einsum("nhwcij,ij->nhwc", windows, kernel.astype(np.float64))
    np.testing.assert_allclose(correlate(images, kernel, "reflect"), expected, rtol=0, atol=2e-5)
    white = np.full((1, 40, 50, 3), 255, np.uint8)
    assert correlate(white, kernel, "reflect").min() >= 255, "a flat area keeps its value"


def test_motion_blur_moves_light_against_the_direction_of_the_line() -> None:
    point = np.zeros((3, 32, 32, 1), np.uint8)
    point[:, 16, 16] = 255
    blurred = blur_along_lines(point, np.array([0, 90, -45], np.float32), radius=6, sigma=2.0)[..., 0]
    weights = 255 * line_weights(6, 2.0)
    np.testing.assert_allclose(blurred[0, 16, 16:3:-1], weights, rtol=1e-6)
    np.testing.assert_allclose(blurred[1, 16:3:-1, 16], weights, rtol=1e-6)
    assert blurred[2, 17, 15] > 0 and blurred[2, 15, 17] == 0
    np.testing.assert_allclose(blurred.sum(axis=(1, 2)), 255, rtol=1e-5)


def test_chamfer_distances() -> None:
    edge = np.zeros((2, 9, 9), np.bool_)
    edge[0, 4, 4] = edge[1, 0, 8] = True
    rows, columns = np.abs(np.indices((9, 9)) - 4)
    near, far = np.minimum(rows, columns), np.maximum(rows, columns)
    # Knight's moves as far as possible, then straight or diagonal ones.
    expected = np.where(
        2 * near <= far, 2.1969 * near + (far - 2 * near), 2.1969 * (far - near) + 1.4 * (2 * near - far)
    )
    np.testing.assert_allclose(chamfer_distance(edge)[0], expected, atol=1e-3)
    assert chamfer_distance(edge)[1, 8, 8] == 8


def test_canny_thins_an_edge_and_drops_weak_ones() -> None:
    gray = np.zeros((2, 16, 16), np.uint8)
    gray[0, :, 8:] = 200
    gray[1, :, 8:] = 30  # gradient 120: between the thresholds, and connected to no strong edge
    edges = canny_edges(gray, 50, 150)
    assert edges[0].sum(axis=1).tolist() == [1] * 16
    assert not edges[1].any()


def test_plasma_fills_the_unit_interval_on_the_next_power_of_two() -> None:
    cloud = plasma(32, 32, 2.0, PerImageRNG(0, "fog", 1, np.arange(20)))
    assert cloud.min(axis=(1, 2)).tolist() == [0] * 20 and cloud.max(axis=(1, 2)).tolist() == [1] * 20
    assert plasma(20, 40, 2.0, PerImageRNG(0, "fog", 1, np.arange(2))).shape == (2, 20, 40)


def test_random_numbers_have_the_moments_of_their_distributions() -> None:
    rng = PerImageRNG(0, "test", 1, np.arange(1000))
    normal, uniform = rng.normal((1000,)), rng.uniform((1000,), -2, 4)
    integers = rng.integers((1000,), -3, 5)
    assert abs(normal.mean()) < 0.004 and abs(normal.std() - 1) < 0.003
    assert abs((normal**4).mean() - 3) < 0.03
    assert abs(uniform.mean() - 1) < 0.007 and abs(uniform.std() - 6 / 12**0.5) < 0.004
    assert uniform.min() > -2 and uniform.max() < 4
    assert np.all(np.abs(np.bincount(integers.ravel() + 3) / 1e6 - 1 / 8) < 0.0015)
    correlations = np.asarray(np.corrcoef(normal[:50]))[~np.eye(50, dtype=bool)]
    assert np.abs(correlations).max() < 0.15, "images do not share a stream"
    assert abs(np.corrcoef(normal[:, 1:].ravel(), normal[:, :-1].ravel())[0, 1]) < 0.004


@pytest.mark.parametrize("num_photons", [3, 50, 500])
def test_poisson_table_has_the_distribution_of_numpy(num_photons: int) -> None:
    shades = np.array([0, 1, 20, 128, 255])
    ours = poisson_quantiles(num_photons).reshape(256, 65536)[shades].astype(float)
    counts = np.random.default_rng(0).poisson(shades * num_photons / 255, (400_000, 5))
    theirs = np.floor(np.minimum(counts / num_photons, 1) * 255)
    np.testing.assert_allclose(ours.mean(axis=1), theirs.mean(axis=0), atol=0.4)
    np.testing.assert_allclose(ours.std(axis=1), theirs.std(axis=0), rtol=0.01)
