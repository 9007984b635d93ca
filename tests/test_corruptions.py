"""Corruptions: the published parameters and pixels, determinism, accepted formats and errors.

corruptions_reference.npz holds 32 CIFAR-10 test images and a photograph of 224x224, and what the published code made
of them: statistics for every corruption, pixels for the deterministic ones.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from random_images import random_images

from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT, arrays, blur, corrupt, digital, noise, weather
from ctta.errors import ConfigError, InputError

REFERENCE = np.load(Path(__file__).parent / "data" / "corruptions_reference.npz")
SEVERITIES = {32: (1, 2, 3, 4, 5), 224: (1, 3, 5)}
REPEATS = {32: 24, 224: 16}  # draws per image that the single draw of the reference is compared with
ALL = [*CORRUPTIONS, *HOLD_OUT]
DETERMINISTIC = [
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
]
CASES = [(size, name, s) for size, severities in SEVERITIES.items() for name, s in product(ALL, severities)]


def test_names_are_those_of_the_benchmark_in_its_order() -> None:
    noises = ["gaussian_noise", "shot_noise", "impulse_noise"]
    blurs = ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]
    weathers = ["snow", "frost", "fog", "brightness"]
    digitals = ["contrast", "elastic_transform", "pixelate", "jpeg_compression"]
    assert list(CORRUPTIONS) == noises + blurs + weathers + digitals
    assert list(HOLD_OUT) == ["speckle_noise", "gaussian_blur", "spatter", "saturate"]


@pytest.mark.parametrize("size, name, severity", [case for case in CASES if case[1] in DETERMINISTIC])
def test_deterministic_corruptions_reproduce_the_reference_pixels(size: int, name: str, severity: int) -> None:
    entry = DETERMINISTIC.index(name), SEVERITIES[size].index(severity)
    expected = REFERENCE[f"pixels_{size}"][entry].astype(int)
    if size == 32:
        result = corrupt(REFERENCE["clean_32"][3:4], name, severity)[0]
    else:
        result = corrupt(REFERENCE["clean_224"], name, severity)[0, :24, 100:148]
    difference = np.abs(result - expected)
    assert difference.max() <= 1
    assert difference.mean() < 0.15


#: The published parameters at 224 pixels for severities 2 and 4, for which there are no reference pixels.
PARAMETERS_WITHOUT_REFERENCE: dict[Any, Any] = {
    noise.GAUSSIAN: (0.12, 0.26),
    noise.SHOT: (25, 5),
    noise.IMPULSE: (0.06, 0.17),
    noise.SPECKLE: (0.2, 0.45),
    blur.GAUSSIAN: (2, 4),
    blur.DEFOCUS: ((4, 0.5), (8, 0.5)),
    blur.GLASS: ((0.9, 2, 1), (1.1, 3, 2)),
    blur.MOTION: ((15, 5), (15, 12)),
    blur.ZOOM: ((1.16, 0.01), (1.26, 0.02)),
    weather.SNOW: ((0.2, 0.3, 2, 0.5, 12, 4, 0.7), (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65)),
    weather.FROST: ((0.8, 0.6), (0.65, 0.7)),
    weather.FOG: ((2, 2), (2.5, 1.5)),
    weather.BRIGHTNESS: (0.2, 0.4),
    digital.CONTRAST: (0.3, 0.1),
    digital.SATURATE: ((0.1, 0), (5, 0.1)),
    digital.ELASTIC: ((2, 0.08, 0.2), (0.07, 0.01, 0.02)),
    digital.PIXELATE: (0.5, 0.3),
    digital.JPEG_QUALITY: (18, 10),
    weather.SPATTER: ((0.65, 0.3, 3, 0.68, 0.6, 0), (0.65, 0.3, 1, 0.65, 1.5, 1)),
}


@pytest.mark.parametrize("table", PARAMETERS_WITHOUT_REFERENCE)
def test_parameters_without_reference_pixels_are_the_published_ones(table: Any) -> None:
    assert (table[1][2], table[1][4]) == PARAMETERS_WITHOUT_REFERENCE[table]
    assert len(table[0]) == len(table[1]) == 6


def statistics(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return, for each entry of axis 0, the mean and standard deviation per channel and the RMS step per image axis."""
    values = images.astype(np.float64)
    steps = [np.sqrt((np.diff(values, axis=axis) ** 2).mean(axis=(1, 2, 3, 4))) for axis in (2, 3)]
    return np.column_stack([values.mean(axis=(1, 2, 3)), values.std(axis=(1, 2, 3)), *steps])


@pytest.mark.parametrize("size, name, severity", CASES)
def test_statistics_match_the_reference(size: int, name: str, severity: int) -> None:
    expected = REFERENCE[f"statistics_{size}"][ALL.index(name), SEVERITIES[size].index(severity)]
    clean = REFERENCE[f"clean_{size}"]
    repeats = 1 if name in DETERMINISTIC else REPEATS[size]
    results = corrupt(np.tile(clean, (repeats, 1, 1, 1)), name, severity)  # every copy has its own index
    ours = statistics(results.reshape(repeats, *clean.shape))
    # The reference is one more draw: within a few standard deviations of ours. The floor is a fifth of a gray level.
    allowed = 0.2 + 4 * ours.std(axis=0)
    assert np.all(np.abs(expected - ours.mean(axis=0)) <= allowed), (expected - ours.mean(axis=0)) / allowed


@pytest.mark.parametrize("height, width", [(32, 32), (17, 33)])
@pytest.mark.parametrize("name", ALL)
def test_draws_depend_on_the_index_only(name: str, height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = random_images(12, height, width)
    whole = corrupt(images, name, 3, seed=5)
    alone = corrupt(images[7:8], name, 3, seed=5, index=[7])
    np.testing.assert_array_equal(alone[0], whole[7])
    order = np.random.default_rng(1).permutation(12)
    np.testing.assert_array_equal(corrupt(images[order], name, 3, seed=5, index=order), whole[order])
    monkeypatch.setattr(arrays, "CHUNK_PIXELS", 5 * height * width)
    np.testing.assert_array_equal(corrupt(images, name, 3, seed=5), whole)
    twice = corrupt(images[[4, 4]], name, 3, seed=5, index=[4, 4])
    np.testing.assert_array_equal(twice, whole[[4, 4]])


@pytest.mark.parametrize("name", [name for name in ALL if name not in DETERMINISTIC])
def test_another_seed_or_index_gives_another_draw(name: str) -> None:
    images = np.tile(random_images(1, 32, 32), (6, 1, 1, 1))
    first = corrupt(images, name, 5)
    for other in (corrupt(images, name, 5, seed=1), corrupt(images, name, 5, index=np.arange(6, 12))):
        assert sum(np.any(a != b) for a, b in zip(first, other, strict=True)) >= 5  # two motion lines may agree


def test_the_number_of_threads_does_not_change_the_result() -> None:
    images = random_images(600, 32, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            results.append(corrupt(images, "elastic_transform", 4))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("name", ALL)
def test_every_format_gives_the_same_pixels_in_its_own_format(name: str) -> None:
    images = random_images(3, 32, 32)
    original = images.copy()
    expected = corrupt(images, name, 2)
    np.testing.assert_array_equal(images, original)
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    for numpy_dtype in (np.float32, np.float64):
        array = corrupt((planes / 255).astype(numpy_dtype), name, 2)
        assert array.dtype == numpy_dtype and array.shape == planes.shape
        np.testing.assert_array_equal(np.rint(array * 255), expected.transpose(0, 3, 1, 2))
    for dtype in (torch.float32, torch.float64, torch.float16):
        tensor = torch.from_numpy(planes).to(torch.float32).div(255).to(dtype)
        result = corrupt(tensor, name, 2)
        assert result.dtype == dtype and result.device == tensor.device and result.is_contiguous()
        np.testing.assert_array_equal(result.float().mul(255).round().numpy(), expected.transpose(0, 3, 1, 2))


def test_a_tensor_that_requires_grad_and_empty_batches_are_accepted() -> None:
    tensor = torch.full((1, 3, 32, 32), 0.5, requires_grad=True)
    assert not corrupt(tensor, "fog", 1).requires_grad
    assert corrupt(np.zeros((0, 32, 32, 3), np.uint8), "snow", 1).shape == (0, 32, 32, 3)
    assert corrupt(torch.zeros(0, 3, 32, 32), "motion_blur", 1, index=[]).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("height, width", [(8, 8), (17, 33), (48, 64), (96, 96), (64, 300), (9, 700)])
@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_images_of_any_size_are_corrupted(name: str, severity: int, height: int, width: int) -> None:
    images = random_images(2, height, width)
    result = corrupt(images, name, severity)
    assert result.shape == images.shape and result.dtype == np.uint8
    if height > 8 and (name, severity, height) != ("defocus_blur", 1, 17):  # a blur of less than a pixel
        assert np.any(result != images)


@pytest.mark.parametrize("name", ["defocus_blur", "gaussian_blur", "glass_blur", "motion_blur", "elastic_transform"])
def test_lengths_scale_with_the_image(name: str) -> None:
    small = REFERENCE["clean_32"][:8]
    large = small.repeat(2, axis=1).repeat(2, axis=2)
    # Enlarging and corrupting resembles corrupting and enlarging, so that shrinking gives similar strength.
    result = corrupt(large, name, 4).reshape(8, 32, 2, 32, 2, 3).mean(axis=(2, 4))
    ours, expected = (np.abs(x - small.astype(float)).mean() for x in (result, corrupt(small, name, 4)))
    assert 0.6 < ours / expected < 1.5


@pytest.mark.parametrize("name", ["snow", "fog", "frost", "motion_blur", "spatter", "zoom_blur"])
def test_black_and_white_images_are_accepted(name: str) -> None:
    for value in (0, 255):
        for severity in (1, 5):
            corrupt(np.full((2, 32, 32, 3), value, np.uint8), name, severity)


GOOD = np.zeros((2, 32, 32, 3), np.uint8)


@pytest.mark.parametrize(
    "arguments, keywords, error, message",
    [
        ((GOOD, "rain", 1), {}, ConfigError, "'rain'.*gaussian_noise.*saturate"),
        ((GOOD, "fog", -0.25), {}, ConfigError, "severity must be a number from 0 to 5, got -0.25"),
        ((GOOD, "fog", 6), {}, ConfigError, "severity must be a number from 0 to 5, got 6"),
        ((GOOD, "fog", float("nan")), {}, ConfigError, "severity must be a number.*got nan"),
        ((GOOD, "fog", "2"), {}, TypeError, "severity must be a number, got '2'"),
        ((GOOD, "fog", True), {}, TypeError, "severity must be a number, got True"),
        ((GOOD, "fog", 1), {"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ((GOOD.tolist(), "fog", 1), {}, TypeError, "list.*uint8 numpy"),
        ((GOOD.astype(np.int64), "fog", 1), {}, TypeError, "int64.*uint8 numpy"),
        ((torch.from_numpy(GOOD), "fog", 1), {}, TypeError, "torch.uint8.*255"),
        ((GOOD[0], "fog", 1), {}, InputError, r"\(32, 32, 3\)"),
        ((GOOD.transpose(0, 3, 1, 2), "fog", 1), {}, InputError, r"\(2, 3, 32, 32\)"),
        ((GOOD / 255, "fog", 1), {}, InputError, r"float64 and shape \(2, 32, 32, 3\)"),
        ((torch.full((1, 3, 32, 32), 1.01), "fog", 1), {}, InputError, r"1\.01 to 1\.01;.*normalizing"),
        ((torch.full((1, 3, 32, 32), -0.1), "fog", 1), {}, InputError, "-0.1"),
        ((torch.full((1, 3, 32, 32), torch.nan), "fog", 1), {}, InputError, "nan"),
        ((GOOD[:, :7], "fog", 1), {}, InputError, "7x32.*8 pixels"),
        ((GOOD, "fog", 1), {"index": [1]}, InputError, r"\(1,\) for 2 images"),
        ((GOOD, "fog", 1), {"index": [0.5, 1.0]}, TypeError, "float64.*integers"),
        ((GOOD, "fog", 1), {"index": [-1, 0]}, InputError, "-1"),
        ((GOOD, "frost", 1), {"frost_photos": "/nowhere"}, ConfigError, "/nowhere.*folder"),
        ((GOOD, "frost", 1), {"frost_photos": []}, ConfigError, "folder"),
    ],
)
def test_errors_name_the_argument(
    arguments: tuple[Any, str, Any], keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        corrupt(*arguments, **keywords)


@pytest.mark.parametrize("name", ["jpeg_compression", "frost"])
def test_missing_pillow_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    weather.load_textures.cache_clear()
    with pytest.raises(ImportError, match=r"ctta\[data\]"):
        corrupt(GOOD, name, 1)


def test_frost_photos_replace_the_shipped_ones(tmp_path: Path) -> None:
    for number in range(7):  # a folder gives its first five, so the white ones are never drawn
        color = (0, 0, 200) if number < 5 else (255, 255, 255)
        Image.new("RGB", (300, 200), color).save(tmp_path / f"{number}.png")
    (tmp_path / "._0.png").write_bytes(b"written by macOS, not an image")
    black = np.zeros((40, 32, 32, 3), np.uint8)
    from_folder = corrupt(black, "frost", 5, frost_photos=tmp_path)
    assert np.all(from_folder == [0, 0, 90])
    np.testing.assert_array_equal(corrupt(black, "frost", 5, frost_photos=[tmp_path / "0.png"]), from_folder)


def test_frost_is_a_crop_of_every_fifth_pixel(tmp_path: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (204, 303, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    small = np.floor(photo[2::5, 2::5].astype(np.float32) * np.float32(0.45)).astype(np.uint8)
    crops = np.lib.stride_tricks.sliding_window_view(small, (32, 32, 3))[:, :, 0]
    results = corrupt(np.zeros((300, 32, 32, 3), np.uint8), "frost", 5, frost_photos=tmp_path)
    matches = [np.argwhere((crops == result).all(axis=(2, 3, 4))) for result in results]
    assert all(len(match) == 1 for match in matches)
    tops, lefts = np.concatenate(matches).T
    assert set(tops) == set(range(len(crops) - 1))  # the published code never takes the last position
    assert (lefts.min(), lefts.max()) == (0, crops.shape[1] - 2)
