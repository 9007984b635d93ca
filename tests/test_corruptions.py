"""The corruption generator against the published recipe, and what it promises about draws, kinds and files.

corruptions_reference.npz holds 32 CIFAR-10 test images and a photograph of 224x224, and what the published
code made of them: statistics for every corruption, pixels for those that draw nothing.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ctta import corruptions
from ctta.corruptions import CORRUPTIONS, HOLD_OUT, blur, corrupt, digital, noise, weather
from ctta.corruptions.blur import disk, glass_sources
from ctta.corruptions.edges import canny, chamfer_distance
from ctta.corruptions.filters import filtered, long_runs
from ctta.corruptions.noise import poisson_values
from ctta.corruptions.plasma import plasma
from ctta.corruptions.resample import box_shrunk, nearest, reflected
from ctta.corruptions.rng import PerImageRNG
from ctta.corruptions.streaks import line_weights, streak

REFERENCE = np.load(Path(__file__).parent / "data" / "corruptions_reference.npz")
SEVERITIES = {32: (1, 2, 3, 4, 5), 224: (1, 3, 5)}
REPEATS = {32: 24, 224: 16}  # draws per image that the reference's one draw is compared with
ALL = [*CORRUPTIONS, *HOLD_OUT]
WITHOUT_DRAWS = [
    "defocus_blur", "zoom_blur", "brightness", "contrast",
    "pixelate", "jpeg_compression", "gaussian_blur", "saturate",
]  # fmt: skip
CASES = [(size, name, s) for size, severities in SEVERITIES.items() for name, s in product(ALL, severities)]


def random_images(count, height, width, seed=0):
    """Smooth colourful images with some grain."""
    rng = np.random.default_rng(seed)
    rows, columns = (np.linspace(0, 1, side)[:, None] ** [1, 2, 3] for side in (height, width))
    smooth = np.einsum("nijc,hi,wj->nhwc", rng.normal(0, 150, (count, 3, 3, 3)), rows, columns) + 128
    return np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)


# --- The published recipe ---------------------------------------------------------------------------------


def test_names_are_the_benchmarks_in_its_order():
    noise = ["gaussian_noise", "shot_noise", "impulse_noise"]
    blur = ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]
    weather = ["snow", "frost", "fog", "brightness"]
    digital = ["contrast", "elastic_transform", "pixelate", "jpeg_compression"]
    assert list(CORRUPTIONS) == noise + blur + weather + digital
    assert list(HOLD_OUT) == ["speckle_noise", "gaussian_blur", "spatter", "saturate"]


@pytest.mark.parametrize("size, name, severity", [case for case in CASES if case[1] in WITHOUT_DRAWS])
def test_pixels_are_the_references_where_nothing_is_drawn(size, name, severity):
    place = WITHOUT_DRAWS.index(name), SEVERITIES[size].index(severity)
    expected = REFERENCE[f"pixels_{size}"][place].astype(int)
    if size == 32:
        result = corrupt(REFERENCE["clean_32"][3:4], name, severity)[0]
    else:
        result = corrupt(REFERENCE["clean_224"], name, severity)[0, :24, 100:148]
    difference = np.abs(result - expected)
    assert difference.max() <= 1
    assert difference.mean() < 0.15


#: The published parameters at 224 pixels for severities 2 and 4, of which there are no reference pixels.
BETWEEN = {
    noise.GAUSSIAN: (0.12, 0.26),
    noise.SHOT: (25, 5),
    noise.IMPULSE: (0.06, 0.17),
    noise.SPECKLE: (0.2, 0.45),
    blur.GAUSSIAN: (2, 4),
    blur.DEFOCUS: ((4, 0.5), (8, 0.5)),
    blur.GLASS: ((0.9, 2, 1), (1.1, 3, 2)),
    blur.MOTION: ((15, 5), (15, 12)),
    blur.ZOOM: ((16, 0.01), (13, 0.02)),
    weather.SNOW: ((0.2, 0.3, 2, 0.5, 12, 4, 0.7), (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65)),
    weather.FROST: ((0.8, 0.6), (0.65, 0.7)),
    weather.FOG: ((2, 2), (2.5, 1.5)),
    weather.BRIGHTNESS: (0.2, 0.4),
    digital.CONTRAST: (0.3, 0.1),
    digital.SATURATE: ((0.1, 0), (5, 0.1)),
    digital.ELASTIC: ((2, 0.08, 0.2), (0.07, 0.01, 0.02)),
    digital.PIXELATE: (0.5, 0.3),
    digital.JPEG_QUALITY: (18, 10),
    corruptions.spatter.SPATTER: ((0.65, 0.3, 3, 0.68, 0.6, 0), (0.65, 0.3, 1, 0.65, 1.5, 1)),
}


@pytest.mark.parametrize("table", BETWEEN)
def test_the_parameters_between_those_with_reference_pixels(table):
    assert (table[1][1], table[1][3]) == BETWEEN[table]
    assert len(table[0]) == len(table[1]) == 5


def statistics(images):
    """Per-channel mean and spread, and the size of the steps downwards and sideways, over axis 0 apart."""
    values = images.astype(np.float64)
    steps = [np.sqrt((np.diff(values, axis=axis) ** 2).mean(axis=(1, 2, 3, 4))) for axis in (2, 3)]
    return np.column_stack([values.mean(axis=(1, 2, 3)), values.std(axis=(1, 2, 3)), *steps])


@pytest.mark.parametrize("size, name, severity", CASES)
def test_statistics_are_the_references(size, name, severity):
    expected = REFERENCE[f"statistics_{size}"][ALL.index(name), SEVERITIES[size].index(severity)]
    clean = REFERENCE[f"clean_{size}"]
    repeats = 1 if name in WITHOUT_DRAWS else REPEATS[size]
    results = corrupt(np.tile(clean, (repeats, 1, 1, 1)), name, severity)  # every copy has an index of its own
    ours = statistics(results.reshape(repeats, *clean.shape))
    # The reference is one more draw: it lies within a few spreads of ours. The floor is a fifth of a level.
    allowed = 0.2 + 4 * ours.std(axis=0)
    assert np.all(np.abs(expected - ours.mean(axis=0)) <= allowed), (expected - ours.mean(axis=0)) / allowed


@pytest.mark.parametrize("height, width, share", [(32, 32, 0.65), (17, 33, 0.95), (48, 64, 0.75), (96, 96, 0.4)])
def test_pixelate_is_pillows_box_filter(height, width, share):
    images = random_images(3, height, width)
    small = int(height * share), int(width * share)
    ours = box_shrunk(box_shrunk(images, small[1], axis=2), small[0], axis=1)
    ours = nearest(nearest(ours, height, axis=1), width, axis=2)
    for image, result in zip(images, ours, strict=True):
        shrunk = Image.fromarray(image).resize(small[::-1], Image.Resampling.BOX)
        np.testing.assert_array_equal(result, shrunk.resize((width, height), Image.Resampling.BOX))


@pytest.mark.parametrize("height, width, reach", [(12, 12, 1), (13, 20, 2), (24, 17, 4)])
def test_glass_blur_follows_the_published_loop(height, width, reach):
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
def test_reflection_is_numpys(repeat_edge, mode):
    outside = np.arange(-30, 37, dtype=np.float32)
    np.testing.assert_array_equal(reflected(outside, 7, repeat_edge), np.pad(np.arange(7), 30, mode))


@pytest.mark.parametrize("radius, sigma", [(1.5, 0.1), (10, 0.5), (17.3, 0.9)])
def test_running_sums_give_the_sum_of_all_weights(radius, sigma):
    kernel = disk(radius, sigma)
    assert (len(long_runs(kernel)) > radius) == (radius > 8)
    images = random_images(2, 40, 50)
    reach = len(kernel) // 2
    padded = np.pad(images, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect").astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape, axis=(1, 2))
    expected = np.einsum("nhwcij,ij->nhwc", windows, kernel.astype(np.float64))
    np.testing.assert_allclose(filtered(images, kernel, "reflect"), expected, rtol=0, atol=2e-5)
    white = np.full((1, 40, 50, 3), 255, np.uint8)
    assert filtered(white, kernel, "reflect").min() >= 255, "a flat area keeps its value"


def test_motion_blur_moves_light_against_the_direction_it_looks_in():
    point = np.zeros((3, 32, 32, 1), np.uint8)
    point[:, 16, 16] = 255
    blurred = streak(point, np.array([0, 90, -45], np.float32), radius=6, sigma=2.0)[..., 0]
    weights = 255 * line_weights(6, 2.0)
    np.testing.assert_allclose(blurred[0, 16, 16:3:-1], weights, rtol=1e-6)
    np.testing.assert_allclose(blurred[1, 16:3:-1, 16], weights, rtol=1e-6)
    assert blurred[2, 17, 15] > 0 and blurred[2, 15, 17] == 0
    np.testing.assert_allclose(blurred.sum(axis=(1, 2)), 255, rtol=1e-5)


def test_distances_are_chamfer_distances():
    edge = np.zeros((2, 9, 9), np.bool_)
    edge[0, 4, 4] = edge[1, 0, 8] = True
    rows, columns = np.abs(np.indices((9, 9)) - 4)
    near, far = np.minimum(rows, columns), np.maximum(rows, columns)
    # Knight's moves as far as they go, then straight or diagonal ones.
    expected = np.where(
        2 * near <= far, 2.1969 * near + (far - 2 * near), 2.1969 * (far - near) + 1.4 * (2 * near - far)
    )
    np.testing.assert_allclose(chamfer_distance(edge)[0], expected, atol=1e-3)
    assert chamfer_distance(edge)[1, 8, 8] == 8


def test_canny_thins_an_edge_and_drops_weak_ones():
    grey = np.zeros((2, 16, 16), np.uint8)
    grey[0, :, 8:] = 200
    grey[1, :, 8:] = 30  # gradient 120: between the thresholds, next to nothing strong
    edges = canny(grey, 50, 150)
    assert edges[0].sum(axis=1).tolist() == [1] * 16
    assert not edges[1].any()


def test_clouds_fill_the_unit_interval_on_the_next_power_of_two():
    cloud = plasma(32, 32, 2.0, PerImageRNG(0, "fog", 1, np.arange(20)))
    assert cloud.min(axis=(1, 2)).tolist() == [0] * 20 and cloud.max(axis=(1, 2)).tolist() == [1] * 20
    assert plasma(20, 40, 2.0, PerImageRNG(0, "fog", 1, np.arange(2))).shape == (2, 20, 40)


# --- PerImageRNG ------------------------------------------------------------------------------------------------


def test_draws_have_the_moments_of_their_distributions():
    draws = PerImageRNG(0, "test", 1, np.arange(1000))
    normal, uniform = draws.normal((1000,)), draws.uniform((1000,), -2, 4)
    whole = draws.integers((1000,), -3, 5)
    assert abs(normal.mean()) < 0.004 and abs(normal.std() - 1) < 0.003
    assert abs((normal**4).mean() - 3) < 0.03
    assert abs(uniform.mean() - 1) < 0.007 and abs(uniform.std() - 6 / 12**0.5) < 0.004
    assert uniform.min() > -2 and uniform.max() < 4
    assert np.all(np.abs(np.bincount(whole.ravel() + 3) / 1e6 - 1 / 8) < 0.0015)
    rows = np.corrcoef(normal[:50])[~np.eye(50, dtype=bool)]
    assert np.abs(rows).max() < 0.15  # images do not share a stream
    assert abs(np.corrcoef(normal[:, 1:].ravel(), normal[:, :-1].ravel())[0, 1]) < 0.004


@pytest.mark.parametrize("photons", [3, 50, 500])
def test_poisson_table_is_what_numpy_draws(photons):
    shades = np.array([0, 1, 20, 128, 255])
    ours = poisson_values(photons).reshape(256, 65536)[shades].astype(float)
    counts = np.random.default_rng(0).poisson(shades * photons / 255, (400_000, 5))
    theirs = np.floor(np.minimum(counts / photons, 1) * 255)
    np.testing.assert_allclose(ours.mean(axis=1), theirs.mean(axis=0), atol=0.4)
    np.testing.assert_allclose(ours.std(axis=1), theirs.std(axis=0), rtol=0.01)


@pytest.mark.parametrize("height, width", [(32, 32), (17, 33)])
@pytest.mark.parametrize("name", ALL)
def test_draw_depends_on_the_index_only(name, height, width, monkeypatch):
    images = random_images(12, height, width)
    whole = corrupt(images, name, 3, seed=5)
    alone = corrupt(images[7:8], name, 3, seed=5, index=[7])
    np.testing.assert_array_equal(alone[0], whole[7])
    order = np.random.default_rng(1).permutation(12)
    np.testing.assert_array_equal(corrupt(images[order], name, 3, seed=5, index=order), whole[order])
    monkeypatch.setattr(corruptions.batches, "CHUNK_PIXELS", 5 * height * width)
    np.testing.assert_array_equal(corrupt(images, name, 3, seed=5), whole)
    twice = corrupt(images[[4, 4]], name, 3, seed=5, index=[4, 4])
    np.testing.assert_array_equal(twice, whole[[4, 4]])


@pytest.mark.parametrize("name", [name for name in ALL if name not in WITHOUT_DRAWS])
def test_another_seed_or_index_is_another_draw(name):
    images = np.tile(random_images(1, 32, 32), (6, 1, 1, 1))
    first = corrupt(images, name, 5)
    for other in (corrupt(images, name, 5, seed=1), corrupt(images, name, 5, index=np.arange(6, 12))):
        assert sum(np.any(a != b) for a, b in zip(first, other, strict=True)) >= 5  # two lines may agree


def test_threads_change_nothing():
    images = random_images(600, 32, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(corrupt(images, "elastic_transform", 4))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*results)


# --- Kinds, sizes and mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_kind_gives_the_same_pixels_in_its_own_kind(name):
    images = random_images(3, 32, 32)
    kept = images.copy()
    expected = corrupt(images, name, 2)
    np.testing.assert_array_equal(images, kept)
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    for kind in (np.float32, np.float64):
        result = corrupt((planes / 255).astype(kind), name, 2)
        assert result.dtype == kind and result.shape == planes.shape
        np.testing.assert_array_equal(np.rint(result * 255), expected.transpose(0, 3, 1, 2))
    for dtype in (torch.float32, torch.float64, torch.float16):
        tensor = torch.from_numpy(planes).to(torch.float32).div(255).to(dtype)
        result = corrupt(tensor, name, 2)
        assert result.dtype == dtype and result.device == tensor.device and result.is_contiguous()
        np.testing.assert_array_equal(result.float().mul(255).round().numpy(), expected.transpose(0, 3, 1, 2))


def test_tensor_that_requires_grad_and_empty_batch():
    tensor = torch.full((1, 3, 32, 32), 0.5, requires_grad=True)
    assert not corrupt(tensor, "fog", 1).requires_grad
    assert corrupt(np.zeros((0, 32, 32, 3), np.uint8), "snow", 1).shape == (0, 32, 32, 3)
    assert corrupt(torch.zeros(0, 3, 32, 32), "motion_blur", 1, index=[]).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("height, width", [(8, 8), (17, 33), (48, 64), (96, 96), (64, 300), (9, 700)])
@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_any_size_is_corrupted(name, severity, height, width):
    images = random_images(2, height, width)
    result = corrupt(images, name, severity)
    assert result.shape == images.shape and result.dtype == np.uint8
    if height > 8 and (name, severity, height) != ("defocus_blur", 1, 17):  # there, a blur is under a pixel
        assert np.any(result != images)


@pytest.mark.parametrize("name", ["defocus_blur", "gaussian_blur", "glass_blur", "motion_blur", "elastic_transform"])
def test_lengths_grow_with_the_image(name):
    small = REFERENCE["clean_32"][:8]
    large = small.repeat(2, axis=1).repeat(2, axis=2)
    # Enlarged twice and corrupted looks like corrupted and enlarged, so shrinking gives similar strength.
    result = corrupt(large, name, 4).reshape(8, 32, 2, 32, 2, 3).mean(axis=(2, 4))
    ours, expected = (np.abs(x - small.astype(float)).mean() for x in (result, corrupt(small, name, 4)))
    assert 0.6 < ours / expected < 1.5


@pytest.mark.parametrize("name", ["snow", "fog", "frost", "motion_blur", "spatter", "zoom_blur"])
def test_black_and_white_images_pass(name):
    for value in (0, 255):
        for severity in (1, 5):
            corrupt(np.full((2, 32, 32, 3), value, np.uint8), name, severity)


GOOD = np.zeros((2, 32, 32, 3), np.uint8)


@pytest.mark.parametrize(
    "arguments, keywords, error, message",
    [
        ((GOOD, "rain", 1), {}, ValueError, "'rain'.*gaussian_noise.*saturate"),
        ((GOOD, "fog", 0), {}, ValueError, "severity is 0.*1 to 5"),
        ((GOOD, "fog", 6), {}, ValueError, "severity is 6.*1 to 5"),
        ((GOOD, "fog", 2.0), {}, TypeError, "severity must be an integer, got 2.0"),
        ((GOOD, "fog", True), {}, TypeError, "severity must be an integer, got True"),
        ((GOOD, "fog", 1), {"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ((GOOD.tolist(), "fog", 1), {}, TypeError, "list.*uint8 numpy"),
        ((GOOD.astype(np.int64), "fog", 1), {}, TypeError, "int64.*uint8 numpy"),
        ((torch.from_numpy(GOOD), "fog", 1), {}, TypeError, "torch.uint8.*255"),
        ((GOOD[0], "fog", 1), {}, ValueError, r"\(32, 32, 3\)"),
        ((GOOD.transpose(0, 3, 1, 2), "fog", 1), {}, ValueError, r"\(2, 3, 32, 32\)"),
        ((GOOD / 255, "fog", 1), {}, ValueError, r"float64 has shape \(2, 32, 32, 3\)"),
        ((torch.full((1, 3, 32, 32), 1.01), "fog", 1), {}, ValueError, r"1\.01 to 1\.01;.*normalising"),
        ((torch.full((1, 3, 32, 32), -0.1), "fog", 1), {}, ValueError, "-0.1"),
        ((torch.full((1, 3, 32, 32), torch.nan), "fog", 1), {}, ValueError, "nan"),
        ((GOOD[:, :7], "fog", 1), {}, ValueError, "7x32.*8 pixels"),
        ((GOOD, "fog", 1), {"index": [1]}, ValueError, r"\(1,\) for 2 images"),
        ((GOOD, "fog", 1), {"index": [0.5, 1.0]}, TypeError, "float64.*integers"),
        ((GOOD, "fog", 1), {"index": [-1, 0]}, ValueError, "-1"),
        ((GOOD, "frost", 1), {"frost_photos": "/nowhere"}, ValueError, "/nowhere.*folder"),
        ((GOOD, "frost", 1), {"frost_photos": []}, ValueError, "folder"),
    ],
)
def test_mistakes_are_named(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        corrupt(*arguments, **keywords)


@pytest.mark.parametrize("name", ["jpeg_compression", "frost"])
def test_missing_pillow_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    corruptions.frost.scaled_photos.cache_clear()
    with pytest.raises(ImportError, match=r"ctta\[data\]"):
        corrupt(GOOD, name, 1)


def test_own_frost_photos_replace_the_shipped(tmp_path):
    for number in range(7):  # a folder gives its first five, so the white ones are never drawn
        colour = (0, 0, 200) if number < 5 else (255, 255, 255)
        Image.new("RGB", (300, 200), colour).save(tmp_path / f"{number}.png")
    (tmp_path / "._0.png").write_bytes(b"a Mac's, and no picture")
    black = np.zeros((40, 32, 32, 3), np.uint8)
    from_folder = corrupt(black, "frost", 5, frost_photos=tmp_path)
    assert np.all(from_folder == [0, 0, 90])
    np.testing.assert_array_equal(corrupt(black, "frost", 5, frost_photos=[tmp_path / "0.png"]), from_folder)


def test_frost_is_a_crop_of_every_fifth_pixel(tmp_path):
    photo = np.random.default_rng(0).integers(0, 256, (204, 303, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    small = np.floor(photo[2::5, 2::5].astype(np.float32) * np.float32(0.45)).astype(np.uint8)
    crops = np.lib.stride_tricks.sliding_window_view(small, (32, 32, 3))[:, :, 0]
    results = corrupt(np.zeros((300, 32, 32, 3), np.uint8), "frost", 5, frost_photos=tmp_path)
    places = [np.argwhere((crops == result).all(axis=(2, 3, 4))) for result in results]
    assert all(len(place) == 1 for place in places)
    tops, lefts = np.concatenate(places).T
    assert set(tops) == set(range(len(crops) - 1))  # the published code never takes the last place
    assert (lefts.min(), lefts.max()) == (0, crops.shape[1] - 2)
