"""Tests of streams over arrays, folders of images and trees of labeled images."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import FRAMES, FRAMES_AS_FLOATS, IMAGES, labels_of, save_image

import ctta
from ctta.data.datasets import ArrayDataset, read_clean_images
from ctta.data.datasets.image_files import ImageFiles
from ctta.data.streams import continual, correlated, folder, image_folder, in_memory, mixed
from ctta.errors import ConfigError, DataError, InputError


def test_in_memory() -> None:
    labels = np.arange(7) % 3
    stream = in_memory(FRAMES, labels, name="clean", batch_size=4)
    assert stream.domains == ["clean"]
    batches = list(stream)
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), FRAMES_AS_FLOATS)
    assert torch.cat([labels_of(batch) for batch in batches]).tolist() == labels.tolist()
    for batch in mixed(stream):
        torch.testing.assert_close(batch.x, FRAMES_AS_FLOATS[batch.index])
    assert next(iter(in_memory(FRAMES, name="clean"))).y is None
    variants = [
        stream,
        in_memory(FRAMES, labels[::-1], name="clean", batch_size=4),
        in_memory(FRAMES, name="clean", batch_size=4),
        in_memory(255 - FRAMES, labels, name="clean", batch_size=4),
        in_memory(FRAMES, labels, name="own", batch_size=4),
    ]
    assert len({variant.hash for variant in variants}) == len(variants)
    assert in_memory(FRAMES, labels.astype(np.uint8), name="clean", batch_size=4).hash == stream.hash


def test_label_maps_in_memory_and_under_corruptions() -> None:
    scenes, maps = IMAGES[:7, :16], np.random.default_rng(1).integers(0, 5, (7, 16, 32))
    plain = in_memory(scenes, maps, name="scenes", batch_size=3)
    corrupted = continual(
        ArrayDataset(scenes, maps.astype(np.uint8), name="scenes"), names=("contrast", "fog"), batch_size=3
    )
    for stream in (plain, corrupted):
        for domain in stream.domains:
            batches = [batch for batch in stream if batch.domain == domain]
            assert torch.equal(torch.cat([labels_of(batch) for batch in batches]), torch.from_numpy(maps))
        net = torch.nn.Conv2d(3, 5, 1)
        assert 0 <= ctta.evaluate(ctta.Source(net), stream).miou <= 1
        with pytest.raises(DataError):
            correlated(stream)
    assert in_memory(scenes, maps[::-1], name="scenes", batch_size=3).hash != plain.hash


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (FRAMES / 255, None, r"uint8 \(N, H, W, 3\), got float64"),
        (FRAMES_AS_FLOATS, None, r"got torch.float32 \(7, 3, 4, 6\)"),
        ([1, 2], None, "got list"),
        (FRAMES, [1, 2], "one integer per image"),
        (FRAMES, np.zeros(7), "one integer per image"),
        (FRAMES, np.zeros((7, 6, 4), np.int64), r"\(7, 6, 4\) for images \(7, 4, 6, 3\)"),
        (FRAMES[:0], None, "no images"),
    ],
)
def test_invalid_arrays(images: Any, labels: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        in_memory(images, labels, name="x")


def test_folder(tmp_path: Path) -> None:
    for number in range(5):
        save_image(tmp_path / "cam" / f"{number}.png", 50 * number)
    (tmp_path / "cam" / "notes.txt").write_text("not an image")
    stream = folder(tmp_path / "cam", batch_size=2)
    batches = list(stream)
    assert [len(batch.x) for batch in batches] == [2, 2, 1]
    assert batches[0].y is None
    assert batches[0].domain == "cam"
    assert batches[1].x.shape == (2, 3, 30, 20)
    assert batches[1].x[1, 0, 0, 0] == pytest.approx(150 / 255)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        for index in range(3):
            path = tmp_path / "pets" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8 + index, 6), (100 * label, index, 0)).save(path)
    return tmp_path / "pets"


def test_image_folder(tree: Path) -> None:
    stream = image_folder(tree, size=(4, 5), order="name", batch_size=4)
    batches = list(stream)
    assert stream.domains == ["pets"]
    assert stream.read_ahead > 0
    assert [labels_of(batch).tolist() for batch in batches] == [[0, 0, 0, 1], [1, 1]]
    assert batches[0].x.shape == (4, 3, 4, 5)
    assert (batches[0].x[:, 0, 0, 0] * 255).round().tolist() == [0, 0, 0, 100]
    assert sorted(label for batch in correlated(stream) for label in labels_of(batch).tolist()) == [0, 0, 0, 1, 1, 1]
    (first,) = image_folder(tree, num_per_class=1, order="name", name="my pets")
    assert labels_of(first).tolist() == [0, 1]
    assert first.domain == "my pets"
    (chosen,) = image_folder(tree, images=["dog/1.png", "cat/1.png"])
    assert labels_of(chosen).tolist() == [1, 0]
    with pytest.raises(DataError):
        list(image_folder(tree))
    assert image_folder(tree, size=(4, 6), order="name", batch_size=4).hash != stream.hash


def test_image_folder_is_shuffled_by_names_only(tree: Path) -> None:
    for name in ("cat", "dog"):
        for index in range(3, 20):
            Image.new("RGB", (8, 6), (0, index, 0)).save(tree / name / f"{index}.png")

    def read_order(**settings: Any) -> list[str]:
        stream = image_folder(tree, size=(4, 5), **settings)
        files = stream.segments[0].images
        assert isinstance(files, ImageFiles)
        labels = [label for batch in stream for label in labels_of(batch).tolist()]
        paths = [files.paths[row] for row in stream.segments[0].rows.tolist()]
        assert [("cat", "dog")[label] for label in labels] == [path.parent.name for path in paths]
        return [f"{path.parent.name}/{path.name}" for path in paths]

    shuffled = read_order()
    changes = sum(one[:3] != other[:3] for one, other in pairwise(shuffled))
    assert changes > 10, "classes take turns"
    assert shuffled == read_order(order="shuffle") != read_order(seed=1)
    for index in (2, 5, 7):
        (tree / "dog" / f"{index}.png").unlink()
    Image.new("RGB", (8, 6)).save(tree / "cat" / "new.png")
    kept = read_order()
    assert [name for name in kept if name != "cat/new.png"] == [name for name in shuffled if (tree / name).exists()]
    assert read_order(order="name") == sorted(kept)
    os.utime(tree / "dog" / "0.png", (1, 1))
    assert read_order(order="time")[0] == "dog/0.png"
    with pytest.raises(ConfigError):
        read_order(order="random")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_per_class": 1, "images": ["cat/0.png"]}, "num_per_class or images, not both"),
        ({"num_per_class": 0}, "None for all images.* at least 1, got 0"),
        ({"num_per_class": -1}, "got -1"),
        ({"images": []}, "at least one entry"),
        ({"images": "cat/0.png"}, "must be a list"),
        ({"images": ["0.png"]}, "<class>/<image>"),
        ({"images": ["../pets/cat/0.png"]}, "below the root"),
        ({"images": ["cat/../../pets/cat/0.png"]}, "below the root"),
        ({"images": ["/etc/passwd"]}, "below the root"),
        ({"transform": lambda image: image}, "transform_name="),
        ({"transform_name": "crop"}, "transform_name="),
        ({"size": (4, 4), "transform": lambda image: image, "transform_name": "same"}, "not both"),
    ],
)
def test_invalid_settings_of_image_folder(tree: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, InputError), match=words):
        image_folder(tree, **settings)


def test_a_folder_per_class_is_shuffled_without_labels_too(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        for index in range(12):
            save_image(tmp_path / "pets" / kind / f"{index:02}.png", index)
            save_image(tmp_path / "camera" / f"2026-11-{index:02}" / f"{kind}.png", index)

    def read_order(name: str, **settings: Any) -> list[str]:
        (segment,) = folder(tmp_path / name, **settings).segments
        assert isinstance(segment.images, ImageFiles) and segment.rows.tolist() == list(range(24))
        return [path.relative_to(tmp_path / name).as_posix() for path in segment.images.paths]

    shuffled = read_order("pets")
    assert shuffled != sorted(shuffled) == read_order("pets", order="name")
    assert shuffled == read_order("pets", order="shuffle") != read_order("pets", seed=1)
    assert folder(tmp_path / "pets").hash != folder(tmp_path / "pets", order="name").hash
    dated = read_order("camera")
    assert dated == sorted(dated) != read_order("camera", order="shuffle")
    labels = read_clean_images(tmp_path / "pets").labels
    assert labels is not None and labels.tolist() == [name[0] == "d" for name in shuffled]
    with pytest.raises(ConfigError):
        read_order("pets", order="random")


def test_image_folder_says_what_is_missing(tree: Path) -> None:
    advice = "check the path, or use ctta.data.streams.folder for images without classes"
    with pytest.raises(DataError, match=advice):
        image_folder(tree.parent / "pest")
    with pytest.raises(DataError, match=advice):
        image_folder(tree / "cat")


def test_hidden_files_are_ignored(tree: Path) -> None:
    before = folder(tree, size=(4, 5)), image_folder(tree, size=(4, 5))
    for place in ("cat/._0.png", ".trash/0.png", "__MACOSX/cat/0.png", "cat/.thumbnails/0.png"):
        (tree / place).parent.mkdir(parents=True, exist_ok=True)
        (tree / place).write_bytes(b"hidden")
    after = folder(tree, size=(4, 5)), image_folder(tree, size=(4, 5))
    assert [stream.hash for stream in after] == [stream.hash for stream in before]
    hidden = tree.rename(tree.parent / ".cache")
    assert len(folder(hidden).segments[0].rows) == 6, "the folder itself may be hidden"


def test_domain_is_the_name_of_the_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert folder(".").domains == image_folder(".").domains == ["pets"]
    assert folder("../pets/cat/..").domains == ["pets"]


def test_transform_needs_a_name(tree: Path) -> None:
    with pytest.raises(ConfigError):
        image_folder(tree, transform=lambda image: image)
    named = image_folder(tree, transform=lambda image: image, transform_name="same")
    assert named.hash != image_folder(tree).hash


@pytest.mark.parametrize(
    "transform",
    [lambda image: image.convert("L"), lambda image: np.asarray(image) / 255, lambda image: None],
)
def test_transform_must_return_images(tree: Path, transform: Callable[[Any], Any]) -> None:
    stream = image_folder(tree, transform=transform, transform_name="wrong")
    with pytest.raises(InputError):
        next(iter(stream))
