"""Fractional severities: whole ones keep their pixels, anchors at 0, determinism, and how distance grows."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_images import random_images

from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT, blur, corrupt, digital, noise, weather
from ctta.data.corruptions.arrays import PerImageRNG
from ctta.data.corruptions.filters import correlate, correlate_folded, gaussian_kernel

DATA = Path(__file__).parent / "data"
REFERENCE = np.load(DATA / "corruptions_reference.npz")
#: Hashes of the pixels of version 1 of the generator, by size, corruption and severity.
HASHES = json.loads((DATA / "corruption_hashes.json").read_text())
ALL = [*CORRUPTIONS, *HOLD_OUT]
QUARTERS = [step / 4 for step in range(21)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", HASHES)
def test_whole_severities_keep_their_pixels(size: str, name: str) -> None:
    clean = REFERENCE[f"clean_{size}"][:4]
    for severity, expected in HASHES[size][name].items():
        for given in (int(severity), float(severity)):
            pixels = corrupt(clean, name, given, seed=3)
            assert hashlib.sha256(pixels.tobytes()).hexdigest()[:16] == expected


#: Where the interpolation between 0 and 1 starts, at 32 and 224 pixels.
ANCHORS: dict[Any, Any] = {
    noise.GAUSSIAN: (0, 0),
    noise.IMPULSE: (0, 0),
    noise.SPECKLE: (0, 0),
    blur.GAUSSIAN: (0, 0),
    blur.DEFOCUS: ((0, 0), (0, 0)),
    blur.GLASS: ((0, 0, 0), (0, 0, 0)),
    blur.MOTION: ((0, 0), (0, 0)),
    blur.ZOOM: ((1, 0.01), (1, 0.01)),
    weather.SNOW: ((0.1, 0.2, 1, 1, 8, 3, 1), (0.1, 0.3, 3, 1, 10, 4, 1)),
    weather.FROST: ((1, 0), (1, 0)),
    weather.FOG: ((0, 3), (0, 2)),
    weather.BRIGHTNESS: (0, 0),
    digital.CONTRAST: (1, 1),
    digital.SATURATE: ((1, 0), (1, 0)),
    digital.ELASTIC: ((0, 0, 0), (0, 999 / 244, 0)),
    digital.PIXELATE: (1, 1),
    digital.JPEG_QUALITY: (100, 85),
    weather.SPATTER: ((0.62, 0.1, 0.7, 0.7, 0, False), (0.65, 0.3, 4, 0.69, 0, False)),
}


def test_anchors_at_severity_0() -> None:
    assert {table: (table[0][0], table[1][0]) for table in ANCHORS} == ANCHORS
    assert [1 / row[0] for row in noise.SHOT] == [0, 0]


def distances(name: str, clean: NDArray[np.uint8]) -> list[float]:
    """Return the mean distance to the clean images at every quarter severity, in gray levels."""
    return [float(np.abs(corrupt(clean, name, severity).astype(int) - clean).mean()) for severity in QUARTERS]


#: Quarter severities at 32 pixels whose images are closer to the clean ones than those before, for the corruptions that
#: grow over whole severities: 7 zooms at 1 and at 1.25, other angles above 4, fewer flakes above 2.
FALLING = {"zoom_blur": {1.25}, "motion_blur": {4.25}, "snow": {2.25}}
#: Corruptions that do not grow over whole severities at 32 pixels.
NOT_GROWING = {"glass_blur", "frost", "elastic_transform", "spatter", "saturate"}


@pytest.mark.parametrize("name", ALL)
def test_the_distance_to_the_clean_images_grows_in_quarter_steps(name: str) -> None:
    found = distances(name, REFERENCE["clean_32"])
    whole = found[::4]
    assert (whole != sorted(whole)) == (name in NOT_GROWING)
    if name not in NOT_GROWING:
        falling = {QUARTERS[step] for step in range(1, 21) if found[step] < found[step - 1]}
        assert falling == FALLING.get(name, set())
    assert found[0] == 0


@pytest.mark.parametrize("name", ALL)
def test_a_fractional_severity_lies_between_its_neighbors(name: str) -> None:
    """At every whole severity, the images shortly before it are nearly those at it: the draws are the same."""
    clean = REFERENCE["clean_32"][:4]
    for severity in (1, 2, 3, 4, 5):
        there = corrupt(clean, name, severity).astype(int)
        before = np.abs(corrupt(clean, name, severity - 1e-4).astype(int) - there).mean()
        assert before < MAX_JUMP.get(name, 0.3)  # a value that is just not whole any more is rounded down


#: Where a whole number changes at a whole severity: that of zooms, and the size that flakes are zoomed to.
MAX_JUMP = {"zoom_blur": 2.0, "snow": 8.5}


@pytest.mark.parametrize("name", ALL)
def test_draws_depend_on_the_index_only(name: str) -> None:
    images = random_images(5, 32, 32)
    whole = corrupt(images, name, 2.25, seed=5)
    np.testing.assert_array_equal(corrupt(images[3:4], name, 2.25, seed=5, index=[3])[0], whole[3])
    np.testing.assert_array_equal(corrupt(images[[4, 1]], name, 2.25, seed=5, index=[4, 1]), whole[[4, 1]])


def test_severity_0_returns_the_images_in_new_memory() -> None:
    images = random_images(2, 32, 32)
    result = corrupt(images, "fog", 0)
    np.testing.assert_array_equal(result, images)
    assert not np.shares_memory(result, images)
    floats = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    assert torch.equal(corrupt(floats, "fog", 0.0), floats)


def test_shot_noise_interpolates_the_inverse_number_of_photons() -> None:
    gray = np.full((40, 32, 32, 3), 128, np.uint8)
    for severity, photons in ((2.5, 1 / ((1 / 250 + 1 / 100) / 2)), (0.25, 2000), (0.001, 500_000)):
        noisy = corrupt(gray, "shot_noise", severity).astype(np.float64) + 0.5  # the fraction is dropped
        assert noisy.mean() == pytest.approx(128, abs=0.3)
        assert noisy.std() == pytest.approx(255 * np.sqrt(128 / 255 / photons), abs=0.35)


def test_half_a_pass_of_glass_blur_moves_half_of_the_pixels() -> None:
    """Over black and white columns a moved pixel is likely to change, and the blur of severity 1 is negligible."""
    stripes = np.tile(np.arange(32) % 2 * 255, (20, 32, 1)).astype(np.uint8)[..., None].repeat(3, axis=-1)
    changed = [(corrupt(stripes, "glass_blur", severity) != stripes).mean() for severity in (0.25, 0.5, 1)]
    assert changed[0] == pytest.approx(changed[2] / 4, rel=0.1)
    assert changed[1] == pytest.approx(changed[2] / 2, rel=0.1)


def test_spatter_fades_from_water_to_mud() -> None:
    clean = REFERENCE["clean_32"][:4]
    water, mud = (
        weather.add_liquid(clean, make_noise(clean), weather.SPATTER[0][severity], 1.0) for severity in (3, 4)
    )
    middle = corrupt(clean, "spatter", 3.5)
    expected = (np.clip(water, 0, 255).astype(np.uint8) / 2 + np.clip(mud, 0, 255).astype(np.uint8) / 2).astype(int)
    np.testing.assert_array_equal(middle, expected)


def make_noise(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the noise of severity 4, which is that of all severities above 3."""
    return PerImageRNG(0, "spatter", 4, np.arange(len(images))).normal(images.shape[1:3])


def test_a_kernel_wider_than_the_image_is_folded() -> None:
    values = np.random.default_rng(0).normal(size=(2, 9, 7, 2))
    weights = gaussian_kernel(12.0, 36)
    for axis, kernel in ((1, weights[:, None]), (2, weights[None])):
        expected = correlate(values, kernel, "symmetric")
        np.testing.assert_allclose(correlate_folded(values, weights, axis), expected, atol=1e-6)
