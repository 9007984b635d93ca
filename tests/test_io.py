"""Files: atomic writes, recorded settings, and which files count as images."""

import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from ctta.errors import ConfigError
from ctta.io.atomic import atomic_write
from ctta.io.images import is_image_file, resize_and_center_crop
from ctta.io.provenance import check_same_settings, record_settings


@pytest.mark.parametrize("unique", [True, False])
def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path: Path, unique: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_write(path, unique=unique) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("unique", [True, False])
def test_an_error_leaves_the_file_as_it_was(tmp_path: Path, unique: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="stop"), atomic_write(path, unique=unique) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_with_unique_names_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first", "the outer block ends last"


def test_leftover_of_a_killed_writer_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.txt.partial").write_text("a longer text that a killed process left behind")
    with atomic_write(tmp_path / "a.txt", unique=False) as temporary:
        assert temporary.name == "a.txt.partial"
        temporary.write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert not (tmp_path / "a.txt.partial").exists()


def test_a_durable_write_syncs_the_file_before_and_the_directory_after_it_is_renamed(tmp_path: Path) -> None:
    steps: list[str] = []
    replace, fsync = os.replace, os.fsync

    def traced_replace(source: Path, target: Path) -> None:
        steps.append("replace")
        replace(source, target)

    def traced_fsync(descriptor: int) -> None:
        steps.append("fsync")
        fsync(descriptor)

    with mock.patch("os.replace", traced_replace), mock.patch("os.fsync", traced_fsync):
        with atomic_write(tmp_path / "a.txt", durable=True) as temporary:
            temporary.write_text("new")
        assert steps == ["fsync", "replace", "fsync"]
        steps.clear()
        with atomic_write(tmp_path / "a.txt") as temporary:
            temporary.write_text("new")
        assert steps == ["replace"]


def test_settings_are_recorded_once_and_compared_later(tmp_path: Path) -> None:
    path = tmp_path / "made" / "settings.json"
    settings = {"seed": 1, "images": "abc"}
    record_settings(path, settings)
    assert json.loads(path.read_text()) == settings
    before = path.stat().st_mtime_ns
    record_settings(path, settings)
    assert path.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=r"made was made with other settings \(seed: 1 → 2\): use another folder"):
        record_settings(path, {**settings, "seed": 2})
    with pytest.raises(ConfigError, match=r"\(size: nothing → 3\)"):
        record_settings(path, {**settings, "size": 3})
    with pytest.raises(ConfigError, match=r"\(images: abc → nothing\)"):
        record_settings(path, {"seed": 1})


def test_nested_settings_are_compared_by_key(tmp_path: Path) -> None:
    recorded = {"options": {"seed": 1, "limit": None}, "commands": ["a"]}
    check_same_settings(tmp_path, recorded, {"options": {"seed": 1, "limit": None}})
    with pytest.raises(ConfigError, match=r"\(options\.limit: nothing → 5\): try again"):
        check_same_settings(tmp_path, recorded, {"options": {"seed": 1, "limit": 5}}, hint="try again")


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
