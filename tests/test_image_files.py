"""Image files: which files count, color modes, bit depths, EXIF orientation, sizes, damage."""

import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import FRAMES, FRAMES_AS_FLOATS, IMAGES, save_image

from ctta.data.streams import folder, live
from ctta.errors import DataError
from ctta.io.images import is_image_file, resize_and_center_crop


def test_color_modes_become_rgb(tmp_path: Path) -> None:
    for mode in ("RGB", "RGBA", "L", "I;16"):
        save_image(tmp_path / f"{mode.replace(';', '')}.png", 100, mode=mode)
    (batch,) = folder(tmp_path, batch_size=4)
    assert batch.x.shape == (4, 3, 30, 20)
    torch.testing.assert_close(batch.x[:, 0, 0, 0], torch.full((4,), 100 / 255))


@pytest.mark.parametrize(("color_type", "num_channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bits_are_reduced_to_the_upper_8(color_type: int, num_channels: int, tmp_path: Path) -> None:
    """Gray, RGB, gray with alpha and RGB with alpha, as PNG numbers them; Pillow cannot write most of these."""
    pixels = np.full((5, 7, num_channels), (100 << 8) + 200, ">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", 7, 5, 16, color_type, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    encoded = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(encoded))
    (batch,) = folder(tmp_path)
    assert batch.x.shape == (1, 3, 5, 7)
    torch.testing.assert_close(batch.x, torch.full((1, 3, 5, 7), 100 / 255))


def test_palette_with_transparent_colors(tmp_path: Path) -> None:
    image = Image.new("P", (7, 5), 1)
    image.putpalette([0, 0, 0, 100, 50, 25])
    image.save(tmp_path / "a.png", transparency=bytes([0, 7]))
    (batch,) = folder(tmp_path)
    assert (batch.x[0, :, 0, 0] * 255).round().tolist() == [100, 50, 25]


def test_portable_anymaps(tmp_path: Path) -> None:
    Image.fromarray(FRAMES[0]).save(tmp_path / "a.ppm")
    Image.fromarray(FRAMES[0, :, :, 1]).save(tmp_path / "b.pgm")
    (batch,) = folder(tmp_path)
    torch.testing.assert_close(batch.x[0], FRAMES_AS_FLOATS[0])
    torch.testing.assert_close(batch.x[1], FRAMES_AS_FLOATS[0, 1].expand(3, 4, 6))


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, tag: int, suffix: str) -> None:
    """The tag says where the first stored row and column are in the scene."""
    scene = np.zeros((16, 32, 3), np.uint8)
    scene[:8, :16] = 200  # bright at the upper left
    flipped = {1: "", 2: "x", 3: "xy", 4: "y", 5: "t", 6: "ty", 7: "txy", 8: "tx"}[tag]
    stored = scene.transpose(1, 0, 2) if "t" in flipped else scene
    stored = stored[:, ::-1] if "x" in flipped else stored
    stored = stored[::-1] if "y" in flipped else stored
    exif = Image.Exif()
    exif[0x0112] = tag
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / f"a.{suffix}", exif=exif)
    (batch,) = folder(tmp_path)
    assert batch.x.shape == (1, 3, 16, 32)
    bright = torch.from_numpy(scene[:, :, 0] > 100)
    assert torch.equal(batch.x[0, 0] > 0.4, bright)
    with Image.open(tmp_path / f"a.{suffix}") as image:
        (frame,) = live([image])
    assert torch.equal(frame.x, batch.x)


def test_unreadable_exif_is_ignored(tmp_path: Path) -> None:
    Image.new("RGB", (8, 6), (255, 0, 0)).save(tmp_path / "a.png", exif=b"Exif\0\0garbage")
    (batch,) = folder(tmp_path)
    assert batch.x.shape == (1, 3, 6, 8)


def test_images_of_different_sizes(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", 1)
    save_image(tmp_path / "b.png", 1, size=(21, 30))
    with pytest.raises(DataError):
        list(folder(tmp_path))
    (batch,) = folder(tmp_path, size=(8, 16))
    assert batch.x.shape == (2, 3, 8, 16)


def test_resize_is_bilinear_and_stream_can_be_pickled(tmp_path: Path) -> None:
    image = Image.fromarray(IMAGES[0])
    image.save(tmp_path / "a.png")
    (batch,) = pickle.loads(pickle.dumps(folder(tmp_path, size=(8, 16))))
    expected = np.array(image.resize((16, 8), Image.Resampling.BILINEAR))
    torch.testing.assert_close(batch.x[0], torch.from_numpy(expected).permute(2, 0, 1) / 255)


def test_damaged_image_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        folder(tmp_path)
    save_image(tmp_path / "a.png", 1)
    complete = (tmp_path / "a.png").read_bytes()
    header = b"P6\n8 x 255\n"  # for which Pillow raises ValueError
    for damaged in (complete[:40], complete[:35] + b"\xff\xff\xff\xff" + complete[39:], b"", header):
        (tmp_path / "b.png").write_bytes(damaged)
        with pytest.raises(DataError, match=r"b\.png"):
            list(folder(tmp_path))
    Image.new("F", (20, 30), 0.5).save(tmp_path / "b.tif")
    (tmp_path / "b.png").unlink()
    with pytest.raises(DataError):
        list(folder(tmp_path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.png", True),
        ("cat/a.JPEG", True),
        ("cat/a.tif", True),
        ("cat/a.txt", False),
        ("cat/._a.png", False),
        (".trash/a.png", False),
        ("cat/__MACOSX/a.png", False),
    ],
)
def test_hidden_files_and_other_suffixes_are_not_images(tmp_path: Path, name: str, expected: bool) -> None:
    root = tmp_path / ".cache"  # folders above the root do not matter
    assert is_image_file(root / name, root) is expected


@pytest.mark.parametrize("size", [(300, 240), (240, 300), (256, 256), (1000, 333)])
def test_center_crop_is_taken_from_the_center(size: tuple[int, int]) -> None:
    width, height = size
    gradient = np.broadcast_to(np.linspace(0, 255, width)[None, :, None], (height, width, 3)).astype(np.uint8)
    cropped = np.asarray(resize_and_center_crop(Image.fromarray(gradient)))
    assert cropped.shape == (224, 224, 3)
    assert abs(cropped.mean() - gradient.mean()) < 1
    small = resize_and_center_crop(Image.fromarray(gradient), resize=64, crop=32)
    assert small.size == (32, 32)
