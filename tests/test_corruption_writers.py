"""Writers of CIFAR-C and ImageNet-C folders: the published layouts, resuming after a kill, atomic files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from random_images import random_images

from ctta.data.corruptions import corrupt, write_cifar_c, write_imagenet_c, writers
from ctta.errors import ConfigError, DataError, InputError


def test_cifar_c_folder_has_the_published_layout(tmp_path: Path) -> None:
    images = random_images(4, 32, 32)
    seen: list[tuple[int, int]] = []
    names = ["contrast", "shot_noise"]
    write_cifar_c(images, [3, 1, 4, 1], tmp_path, names=names, seed=2, progress=lambda *step: seen.append(step))
    assert np.load(tmp_path / "labels.npy").tolist() == [3, 1, 4, 1] * 5
    assert {path.name for path in tmp_path.iterdir()} == {
        "contrast.npy",
        "labels.npy",
        "made_from.json",
        "shot_noise.npy",
    }
    for name in names:
        stored = np.load(tmp_path / f"{name}.npy")
        assert stored.dtype == np.uint8 and stored.shape == (20, 32, 32, 3)
        for severity in range(1, 6):
            part = stored[4 * (severity - 1) : 4 * severity]
            np.testing.assert_array_equal(part, corrupt(images, name, severity, seed=2))
    assert seen == [(done, 40) for done in range(4, 41, 4)]


KILLED = """
import os, signal, sys
import numpy as np
from ctta.data.corruptions import write_cifar_c
def die(done, total):
    if done == 40:  # in the middle of the second of three files
        os.kill(os.getpid(), signal.SIGKILL)
images = np.load(sys.argv[1])
write_cifar_c(images, range(5), sys.argv[2], names=["contrast", "snow", "fog"], progress=die)
"""


def test_killed_cifar_c_run_is_resumed(tmp_path: Path) -> None:
    images = random_images(5, 32, 32)
    np.save(tmp_path / "images.npy", images)
    folder = tmp_path / "made"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "images.npy"), str(folder)]
    search = os.pathsep.join(sys.path)
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": search}).returncode == -signal.SIGKILL
    assert {path.name for path in folder.glob("*.npy")} == {"labels.npy", "contrast.npy"}
    assert (folder / "snow.npy.partial").exists()

    before = (folder / "contrast.npy").stat().st_mtime_ns
    time.sleep(0.01)
    write_cifar_c(images, range(5), folder, names=["contrast", "snow", "fog"])
    assert (folder / "contrast.npy").stat().st_mtime_ns == before
    assert not list(folder.glob("*.partial"))
    write_cifar_c(images, range(5), tmp_path / "at once", names=["contrast", "snow", "fog"])
    for name in ("contrast", "snow", "fog"):
        np.testing.assert_array_equal(np.load(folder / f"{name}.npy"), np.load(tmp_path / "at once" / f"{name}.npy"))


def test_failing_run_leaves_no_partial_file_behind(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_cifar_c(random_images(2, 32, 32), [0, 1], tmp_path, names=["fog"], progress=fail)
    assert {path.name for path in tmp_path.iterdir()} == {"labels.npy", "made_from.json"}


def test_a_folder_made_with_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = random_images(2, 32, 32)
    write_cifar_c(images, [0, 1], tmp_path, names=["contrast"])
    with pytest.raises(ConfigError, match="seed: 0"):
        write_cifar_c(images, [0, 1], tmp_path, names=["fog"], seed=1)
    with pytest.raises(ConfigError, match="images: "):
        write_cifar_c(images[::-1].copy(), [0, 1], tmp_path, names=["fog"])
    with pytest.raises(InputError):
        write_cifar_c(images, [0], tmp_path, names=["fog"])
    floats: Any = images.transpose(0, 3, 1, 2) / 255
    with pytest.raises(TypeError, match=r"float64.*uint8"):
        write_cifar_c(floats, [0, 1], tmp_path, names=["fog"])
    no_names: list[str] = []
    for names, words in ((["mist"], "unknown corruption 'mist'; expected one of"), (no_names, "names is")):
        with pytest.raises(ConfigError, match=words):
            write_cifar_c(images, [0, 1], tmp_path, names=names)
    with pytest.raises(ConfigError, match="labels: "):
        write_cifar_c(images, [1, 0], tmp_path, names=["fog"])
    with pytest.raises(TypeError, match="float64"):
        write_cifar_c(images, [0.0, 1.0], tmp_path, names=["fog"])
    assert np.load(tmp_path / "labels.npy").tolist() == [0, 1] * 5
    monkeypatch.setattr(writers, "VERSION", 2)
    with pytest.raises(ConfigError, match="generator: "):
        write_cifar_c(images, [0, 1], tmp_path, names=["fog"])


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Return a folder of three clean images in two classes."""
    source = tmp_path / "clean"
    for position, (label, name) in enumerate([("cat", "a.JPEG"), ("cat", "b.png"), ("dog", "a.jpg")]):
        (source / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_images(1, 240, 300 + 60 * position, position)[0]).save(source / label / name)
    return source


def test_imagenet_c_folder_has_the_published_layout(clean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    seen: list[tuple[int, int]] = []
    write_imagenet_c(
        clean, folder, names=["contrast", "fog"], severities=(1, 5), crop=True, progress=lambda *s: seen.append(s)
    )
    stored = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.JPEG"))
    assert stored == sorted(
        f"{name}/{severity}/{stem}.JPEG"
        for name in ("contrast", "fog")
        for severity in (1, 5)
        for stem in ("cat/a", "cat/b", "dog/a")
    )
    assert seen == [(12, 12)]
    with Image.open(folder / "contrast/1/cat/b.JPEG") as file:
        assert file.size == (224, 224) and file.format == "JPEG"
        result = np.asarray(file).astype(int)
    resized = Image.open(clean / "cat/b.png").resize((384, 256), Image.Resampling.BILINEAR)
    cropped = np.asarray(resized.crop((80, 16, 304, 240)))
    assert np.abs(result - corrupt(cropped[None], "contrast", 1)[0]).mean() < 3  # the loss of JPEG


def test_images_keep_their_size_unless_they_are_cropped(clean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    write_imagenet_c(clean, folder, names=["contrast"], severities=(1,))
    for stem, name in {"cat/a": "cat/a.JPEG", "cat/b": "cat/b.png", "dog/a": "dog/a.jpg"}.items():
        with Image.open(folder / f"contrast/1/{stem}.JPEG") as made, Image.open(clean / name) as original:
            assert made.size == original.size
            expected = corrupt(np.asarray(original)[None], "contrast", 1)[0]
            assert np.abs(np.asarray(made).astype(int) - expected).mean() < 4  # the loss of JPEG
    with pytest.raises(ConfigError, match="size: original"):
        write_imagenet_c(clean, folder, names=["contrast"], severities=(1,), crop=True)
    write_imagenet_c(clean, tmp_path / "cropped", names=["contrast"], severities=(1,), crop=True)
    with pytest.raises(ConfigError):
        write_imagenet_c(clean, tmp_path / "cropped", names=["contrast"], severities=(1,))


def test_imagenet_c_run_is_resumed_and_extended(clean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    write_imagenet_c(clean, folder, names=["snow"], severities=(3,))
    paths = sorted(folder.rglob("*.JPEG"))
    contents = [path.read_bytes() for path in paths]
    times = [path.stat().st_mtime_ns for path in paths]
    paths[1].unlink()
    Image.fromarray(random_images(1, 256, 256)[0]).save(clean / "cat" / "aa.png")
    write_imagenet_c(clean, folder, names=["snow"], severities=(3,))
    assert [path.read_bytes() for path in paths] == contents, "a new image does not change the draws of the others"
    unchanged = [path.stat().st_mtime_ns == then for path, then in zip(paths, times, strict=True)]
    assert unchanged == [True, False, True]
    assert (folder / "snow/3/cat/aa.JPEG").exists()
    assert not list(folder.rglob("*.partial"))


def test_a_cifar_c_folder_is_not_continued_as_imagenet_c(clean: Path, tmp_path: Path) -> None:
    write_cifar_c(random_images(1, 32, 32), [0], tmp_path / "made", names=["contrast"])
    with pytest.raises(ConfigError, match=r"images: \w{64} → nothing"):
        write_imagenet_c(clean, tmp_path / "made", names=["contrast"])


def test_hidden_files_are_skipped_and_tiff_is_read(clean: Path, tmp_path: Path) -> None:
    for hidden in ("cat/._a.JPEG", ".trash/a.png", "__MACOSX/a.png"):
        (clean / hidden).parent.mkdir(exist_ok=True)
        (clean / hidden).write_bytes(b"not an image")
    Image.new("RGB", (240, 240)).save(clean / "dog" / "b.tif")
    write_imagenet_c(clean, tmp_path / "made", names=["contrast"], severities=(1,))
    made = sorted(
        path.relative_to(tmp_path / "made/contrast/1").as_posix() for path in tmp_path.rglob("made/**/*.JPEG")
    )
    assert made == ["cat/a.JPEG", "cat/b.JPEG", "dog/a.JPEG", "dog/b.JPEG"]


def test_errors_name_the_cause_before_anything_is_written(clean: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        write_imagenet_c(tmp_path / "nowhere", tmp_path / "made")
    wrong: list[tuple[Any, type[Exception]]] = [((0,), ConfigError), ((1, 6), ConfigError), (("2",), TypeError)]
    for severities, error in wrong:
        with pytest.raises(error, match="severity"):
            write_imagenet_c(clean, tmp_path / "made", severities=severities)
    no_integer: Any = 0.5
    with pytest.raises(TypeError, match="seed"):
        write_imagenet_c(clean, tmp_path / "made", seed=no_integer)
    with pytest.raises(TypeError, match="seed"):
        write_cifar_c(random_images(1, 32, 32), [0], tmp_path / "made", seed=no_integer)
    assert not (tmp_path / "made").exists()
    whole = (clean / "cat" / "a.JPEG").read_bytes()
    (clean / "cat" / "a.JPEG").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError):
        write_imagenet_c(clean, tmp_path / "made", names=["contrast"])
    Image.new("RGB", (20, 20)).save(clean / "cat" / "b.jpg")
    with pytest.raises(DataError):
        write_imagenet_c(clean, tmp_path / "made")
