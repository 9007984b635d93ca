"""Tests of the readers of ACDC and Cityscapes: label maps of every kind, also damaged ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import labels_of, save_image

from ctta.data.streams import Stream, acdc, cityscapes, rounds
from ctta.errors import ConfigError, DataError


def read_fog(root: Path) -> Stream:
    return acdc(root, conditions=("fog",), split="val", size=None)


def write_scene(image: Path, label_map: Path, train_id: int = 3) -> None:
    save_image(image, 10, size=(64, 32))
    label_map.parent.mkdir(parents=True, exist_ok=True)
    values = np.full((32, 64), train_id, np.uint8)
    values[0] = 255
    Image.fromarray(values).save(label_map)


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    for condition in ("fog", "night", "rain", "snow"):
        for frame in ("f1", "f2"):
            write_scene(
                tmp_path / "rgb_anon" / condition / "train" / "GP01" / f"{frame}_rgb_anon.png",
                tmp_path / "gt" / condition / "train" / "GP01" / f"{frame}_gt_labelTrainIds.png",
            )
    return tmp_path


def test_acdc(scenes: Path) -> None:
    stream = rounds(acdc(scenes, size=(16, 32)), 2)
    assert stream.domains == ["fog", "night", "rain", "snow"] * 2
    batches = list(stream)
    assert len(batches) == 16
    assert batches[0].x.shape == (1, 3, 16, 32)
    assert labels_of(batches[0]).shape == (1, 32, 64)
    assert set(labels_of(batches[0]).unique().tolist()) == {3, 255}
    assert (batches[0].x.amax((0, 2, 3)) * 255).round().tolist() == [10, 0, 0], "the order is RGB"
    (scenes / "rgb_anon" / "fog" / "train" / "GP01" / "._f1_rgb_anon.png").write_bytes(b"written by macOS")
    assert len(acdc(scenes)) == 8
    with pytest.raises(ConfigError):
        acdc(scenes, conditions="fog")


def test_cityscapes(tmp_path: Path) -> None:
    write_scene(
        tmp_path / "leftImg8bit" / "val" / "bonn" / "b_leftImg8bit.png",
        tmp_path / "gtFine" / "val" / "bonn" / "b_gtFine_labelTrainIds.png",
    )
    (batch,) = cityscapes(tmp_path)
    assert batch.x.shape == (1, 3, 32, 64)
    assert batch.domain == "clear"


def test_label_ids_become_train_ids(tmp_path: Path) -> None:
    """The table is that of Cityscapes: name, id, trainId."""
    table = """road 7 0, sidewalk 8 1, building 11 2, wall 12 3, fence 13 4, pole 17 5, traffic-light 19 6,
        traffic-sign 20 7, vegetation 21 8, terrain 22 9, sky 23 10, person 24 11, rider 25 12, car 26 13,
        truck 27 14, bus 28 15, train 31 16, motorcycle 32 17, bicycle 33 18"""
    expected = np.full(256, 255)
    for entry in table.split(","):
        _, label_id, train_id = entry.split()
        expected[int(label_id)] = int(train_id)
    ids = np.array([*range(34), 255], np.uint8)
    cases: list[tuple[str, str, Callable[[Path], Stream]]] = [
        ("leftImg8bit/val/bonn/b_leftImg8bit.png", "gtFine/val/bonn/b_gtFine_labelIds.png", cityscapes),
        ("rgb_anon/fog/val/G/b_rgb_anon.png", "gt/fog/val/G/b_gt_labelIds.png", read_fog),
    ]
    for image, label_map, read in cases:
        write_scene(tmp_path / image, tmp_path / label_map)
        Image.fromarray(np.tile(ids, (18, 1))).save(tmp_path / label_map)
        (batch,) = read(tmp_path)
        assert labels_of(batch).dtype == torch.int64
        assert labels_of(batch)[0].tolist() == [expected[ids].tolist()] * 18
        before = read(tmp_path).hash
        write_scene(tmp_path / image, tmp_path / label_map.replace("labelIds", "labelTrainIds"), train_id=5)
        (batch,) = read(tmp_path)
        assert set(labels_of(batch).unique().tolist()) == {5, 255}, "trainIds are preferred"
        assert read(tmp_path).hash != before, "other labels change the hash"
        derived = np.tile(expected[ids].astype(np.uint8), (18, 1))
        Image.fromarray(derived).save(tmp_path / label_map.replace("labelIds", "labelTrainIds"))
        assert read(tmp_path).hash == before, "derived trainIds are equivalent"
        (tmp_path / label_map.replace("labelIds", "labelTrainIds")).unlink()
        for invalid in (34, 254, 26001):
            Image.fromarray(np.full((2, 2), invalid, np.uint16)).save(tmp_path / label_map)
            with pytest.raises(DataError):
                list(read(tmp_path))


@pytest.mark.parametrize("size", [(31, 63), (1, 1), None])
@pytest.mark.parametrize("mode", ["RGBA", "L", "I;16"])
def test_color_modes_and_sizes(mode: str, size: tuple[int, int] | None, scenes: Path) -> None:
    scene = scenes / "rgb_anon" / "fog" / "train" / "GP01" / "f1_rgb_anon.png"
    save_image(scene, 100, size=(61, 33), mode=mode)
    batch = next(iter(acdc(scenes, size=size)))
    assert batch.x.shape == (1, 3, *(size or (33, 61)))
    torch.testing.assert_close(batch.x[:, 0], torch.full_like(batch.x[:, 0], 100 / 255))
    assert labels_of(batch).shape == (1, 32, 64)


def test_label_maps_with_16_bits_or_a_palette(scenes: Path) -> None:
    label_map = scenes / "gt" / "fog" / "train" / "GP01" / "f1_gt_labelTrainIds.png"
    values = np.full((33, 65), 18, np.uint8)
    values[0] = 255
    with_palette = Image.fromarray(values, "L").convert("P")
    with_palette.putdata(values.ravel().tolist())
    for stored in (Image.fromarray(values.astype(np.uint16)), with_palette):
        stored.save(label_map)
        batch = next(iter(acdc(scenes)))
        assert torch.equal(labels_of(batch)[0], torch.from_numpy(values.astype(np.int64)))


@pytest.mark.parametrize("map_size", [(64, 32), (32, 32), (64, 48)])  # rotated, cropped, and too high
def test_label_map_of_another_aspect_ratio(map_size: tuple[int, int], scenes: Path) -> None:
    label_map = scenes / "gt" / "fog" / "train" / "GP01" / "f2_gt_labelTrainIds.png"
    Image.fromarray(np.zeros(map_size, np.uint8)).save(label_map)
    with pytest.raises(DataError):
        list(acdc(scenes))


def test_images_may_be_smaller_than_their_label_maps(scenes: Path) -> None:
    for number in (1, 2):
        save_image(scenes / "rgb_anon" / "fog" / "train" / "GP01" / f"f{number}_rgb_anon.png", 10, size=(21, 11))
    assert len(list(acdc(scenes, conditions=("fog",)))) == 2


def test_damaged_scenes(scenes: Path) -> None:
    with pytest.raises(DataError):
        acdc(scenes, split="val")
    label_map = scenes / "gt" / "rain" / "train" / "GP01" / "f1_gt_labelTrainIds.png"
    Image.fromarray(np.full((32, 64), 40, np.uint8)).save(label_map)
    with pytest.raises(DataError, match="trainIds"):
        list(acdc(scenes))
    for mode in ("RGB", "RGBA", "LA", "1", "F"):
        Image.new(mode, (64, 32)).save(label_map, "TIFF" if mode == "F" else "PNG")
        with pytest.raises(DataError, match="one integer per pixel"):
            list(acdc(scenes))
    Image.fromarray(np.full((32, 64), -1, np.int32)).save(label_map, "TIFF")
    with pytest.raises(DataError):
        list(acdc(scenes))
    label_map.write_bytes(b"P6\n8 x 255\n")
    with pytest.raises(DataError, match="truncated"):
        list(acdc(scenes))
    label_map.unlink()
    with pytest.raises(DataError):
        acdc(scenes)
