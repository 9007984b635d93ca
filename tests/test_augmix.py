"""AugMix's views: operations as Pillow's, mixtures as published, and MEMO with them."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

import ctta
from ctta.core.registry import resolve_method
from ctta.errors import ConfigError, InputError
from ctta.testing import NETWORKS
from ctta.views import AugMixView, augmix_views
from ctta.views.augmix import OPERATIONS, apply_operations_, find_crop
from ctta.views.average import augment_with_views

SIZE = 32


def draw(seed: int = 0, **settings: Any) -> AugMixView:
    (view,) = augmix_views(1, **settings).draw(torch.Generator().manual_seed(seed))
    return view


def make_bytes(seed: int, mode: str = "RGB") -> Image.Image:
    """Return noise for even seeds, and something smooth for odd ones."""
    generator, channels = np.random.default_rng(seed), len(mode) if mode == "RGB" else 1
    if seed % 2:
        small = generator.integers(0, 256, (4, 4, channels), dtype=np.uint8)
        return Image.fromarray(small.squeeze()).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return Image.fromarray(generator.integers(20, 180, (SIZE, SIZE, channels), dtype=np.uint8).squeeze())


def to_tensor(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image)).double()
    return (pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels.unsqueeze(0)).unsqueeze(0)


def apply_with_pillow(image: Image.Image, name: str, level: float) -> Image.Image:
    """Apply an operation as public code does, with the fill color 128."""
    identity = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    changes: dict[str, dict[int, float]] = {
        "shear_x": {1: level * 0.03},
        "shear_y": {3: level * 0.03},
        "translate_x": {2: int(level * SIZE / 30)},
        "translate_y": {5: int(level * SIZE / 30)},
    }
    if name in changes:
        for place, value in changes[name].items():
            identity[place] = value
        return image.transform(
            (SIZE, SIZE), Image.Transform.AFFINE, identity, resample=Image.Resampling.BILINEAR, fillcolor=128
        )
    if name == "rotate":
        return image.rotate(int(level * 3), resample=Image.Resampling.BILINEAR, fillcolor=128)
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(abs(level) * 25.6))
    if name == "posterize":
        return ImageOps.posterize(image, 4)
    return ImageOps.equalize(image) if name == "equalize" else ImageOps.autocontrast(image)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_pillow(name: str, mode: str) -> None:
    num_changed = 0
    for seed, level in enumerate((0.4, -0.55, 0.95, -1.0, 0.7, 0.99)):
        image = make_bytes(seed, mode)
        expected = to_tensor(apply_with_pillow(image, name, level))
        found = to_tensor(image)
        apply_operations_(found, [(name, level)])
        if name == "autocontrast":  # Pillow's table is one too low for some values whose exact result is whole
            pixels = to_tensor(image)
            low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
            is_whole = (pixels - low) * 255 % (high - low) == 0
            assert torch.equal(found[~is_whole], expected[~is_whole])
            assert {*(found - expected)[is_whole].tolist()} <= {0.0, 1.0}
        else:
            assert torch.equal(found, expected)
        num_changed += not torch.equal(found, to_tensor(image))
    assert num_changed >= 2  # most translations of a small image are by nothing


def test_images_of_one_value_are_not_stretched() -> None:
    for name in ("autocontrast", "equalize"):
        flat = torch.full((1, 3, 8, 8), 77.0)
        apply_operations_(flat, [(name, 1.0)])
        assert torch.equal(flat, torch.full((1, 3, 8, 8), 77.0))


def test_several_views_at_once_are_those_one_by_one() -> None:
    views = augmix_views(20, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3)).draw(torch.Generator().manual_seed(2))
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    found = augment_with_views(views, x, "MEMO")
    for view, images in zip(views, found.split(2), strict=True):
        assert torch.equal(view.augment(x), images)


def test_a_view_is_the_mixture_of_its_chains() -> None:
    view, image = draw(3, crop="none"), make_bytes(1)
    assert sum(view.weights) == pytest.approx(1)
    flipped = ImageOps.mirror(image) if view.flip else image
    expected = view.own_weight * to_tensor(flipped)
    for chain, weight in zip(view.chains, view.weights, strict=True):
        changed = flipped
        for name, level in chain:
            assert name != "autocontrast"  # it may differ by one, see above
            changed = apply_with_pillow(changed, name, level)
        expected = expected + (1 - view.own_weight) * weight * to_tensor(changed)
    torch.testing.assert_close(view.augment(to_tensor(image) / 255), expected / 255, rtol=0, atol=1e-12)


@pytest.mark.parametrize("crop", ["pad", "resize", "none"])
def test_views_stay_in_range_and_treat_images_alone(crop: str) -> None:
    x = torch.rand(3, 3, 16, 20, generator=torch.Generator().manual_seed(0))
    x[0] = 1.0
    for seed in range(12):
        view = draw(seed, crop=crop)
        images = view.augment(x)
        assert images.shape == x.shape and images.dtype == x.dtype
        assert images.min() >= 0 and images.max() <= 1
        for one, image in zip(x.split(1), images.split(1), strict=True):
            torch.testing.assert_close(view.augment(one), image)


def test_the_seed_decides_the_views() -> None:
    assert draw(5) == draw(5) != draw(6)
    x = torch.rand(1, 3, 16, 16)
    assert torch.equal(draw(5).augment(x), draw(5).augment(x))
    views = augmix_views(4).draw(torch.Generator().manual_seed(0))
    assert len({*views}) == 4


def test_the_draws_are_distributed_as_published() -> None:
    views = augmix_views(3000).draw(torch.Generator().manual_seed(0))
    weights = torch.tensor([view.weights for view in views])
    torch.testing.assert_close(weights.mean(0), torch.full((3,), 1 / 3), rtol=0, atol=0.02)
    torch.testing.assert_close(weights.var(0), torch.full((3,), 1 / 18), rtol=0, atol=0.005)  # Dirichlet(1, 1, 1)
    own = torch.tensor([view.own_weight for view in views])
    torch.testing.assert_close(own.sort().values, torch.linspace(0, 1, 3000), rtol=0, atol=0.04)  # Beta(1, 1)
    chains = [chain for view in views for chain in view.chains]
    depths = Counter(len(chain) for chain in chains)
    assert sorted(depths) == [1, 2, 3] and all(abs(count / 9000 - 1 / 3) < 0.02 for count in depths.values())
    names = Counter(name for chain in chains for name, _ in chain)
    total = sum(names.values())
    assert {*names} == {*OPERATIONS} and all(abs(count / total - 1 / 9) < 0.01 for count in names.values())
    levels = torch.tensor([level for chain in chains for _, level in chain])
    assert 0.1 <= levels.abs().min() < 0.11 and 0.99 < levels.abs().max() <= 1.0
    assert abs(float((levels > 0).double().mean()) - 0.5) < 0.02
    assert abs(sum(view.flip for view in views) / 3000 - 0.5) < 0.03


def test_a_padded_crop_shifts_by_an_eighth() -> None:
    x, shifts = torch.zeros(1, 1, 32, 32), Counter[int]()
    x[:, :, :, 16] = 1.0
    for view in augmix_views(400).draw(torch.Generator().manual_seed(0)):
        shifts[int(view._crop(x)[0, 0, 16].argmax()) - 16] += 1
    assert sorted(shifts) == list(range(-4, 5)) and min(shifts.values()) > 20


def test_a_resized_crop_has_the_published_areas_and_ratios() -> None:
    areas = []
    for view in augmix_views(500, crop="resize").draw(torch.Generator().manual_seed(0)):
        top, left, rows, columns = find_crop(224, 224, view.crop_draws)
        assert top >= 0 and left >= 0 and top + rows <= 224 and left + columns <= 224
        assert 0.74 < columns / rows < 1.35
        areas.append(rows * columns / 224**2)
    assert 0.07 < min(areas) < 0.1 and max(areas) > 0.95 and 0.45 < sum(areas) / 500 < 0.6
    assert find_crop(10, 100, [(1.0, 0.5, 0.0, 0.0)]) == (0, 43, 10, 13)  # nothing fits: the center


def test_images_normalized_outside_the_model() -> None:
    normalized: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}
    mean, std = (torch.tensor(normalized[name]).view(3, 1, 1) for name in ("mean", "std"))
    x = torch.rand(2, 3, 16, 16)
    found = draw(1, **normalized).augment((x - mean) / std)
    torch.testing.assert_close(found, (draw(1).augment(x) - mean) / std, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_views": 0}, "AugMixViews takes 1 to 4096 views, got 0"),
        ({"crop": "middle"}, "crop must be 'pad', 'resize' or 'none', got 'middle'"),
        ({"mean": (0.5,)}, "give mean and std together"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        augmix_views(**settings)


def test_logits_of_pixels_are_refused() -> None:
    with pytest.raises(ConfigError):
        draw()(lambda x: x, torch.rand(1, 3, 16, 16))


def test_memo_has_these_views(tmp_path: Path) -> None:
    net, x = NETWORKS["batch_norm"]().eval(), torch.rand(2, 3, 16, 16)
    assert ctta.MEMO(net).views == augmix_views(32)
    settings = resolve_method("memo").parse(["views=2"])
    assert settings["views"] == augmix_views(2)
    model = ctta.MEMO(net, **settings)
    model(x)
    ctta.save(model, tmp_path / "memo.safetensors")
    assert torch.equal(ctta.load(tmp_path / "memo.safetensors", net)(x), model(x))
    with pytest.raises(InputError):
        model(2 * x / x.max())
