"""Tests of the reader of ImageNet-C, also on incomplete folders."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import NAMES, labels_of, save_image

from ctta.data.datasets import ImageFiles, ImageNetC
from ctta.data.streams import continual
from ctta.errors import ConfigError, DataError


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    for corruption in NAMES:
        for label, name in enumerate(("n01", "n02")):
            for index in range(3):
                save_image(tmp_path / corruption / "5" / name / f"{index}.JPEG", 40 * label + index, size=(224, 224))
    return tmp_path


def test_imagenet_c(imagenet: Path, tmp_path: Path) -> None:
    stream = continual(ImageNetC(imagenet, order="name"), names=NAMES, batch_size=4)
    batches = list(stream)
    assert stream.read_ahead > 0
    assert [labels_of(batch).tolist() for batch in batches] == [[0, 0, 0, 1], [1, 1]] * 2
    first = continual(ImageNetC(imagenet, num_per_class=1, order="name"), names=NAMES, batch_size=4)
    assert [labels_of(batch).tolist() for batch in first] == [[0, 1]] * 2
    images = first.segments[0].images
    assert isinstance(images, ImageFiles)
    assert [path.name for path in images.paths] == ["0.JPEG"] * 2
    listing = tmp_path / "list.txt"
    listing.write_text("n02/2.JPEG\nn01/0.JPEG\n")
    chosen = continual(ImageNetC(imagenet, images=listing), names=NAMES, batch_size=4)
    assert [labels_of(batch).tolist() for batch in chosen] == [[1, 0]] * 2
    assert len({stream.hash, first.hash, chosen.hash}) == 3
    double = continual(ImageNetC(imagenet, order="name", double_resize=True), names=NAMES, batch_size=4)
    assert double.hash != stream.hash
    for lines, words in (("n02/9.JPEG", r"9\.JPEG is missing: "), ("n02/9.JPEG\nn02/8.JPEG", "missing, and 1 more of")):
        listing.write_text(lines)
        with pytest.raises(DataError, match=f"{words}.*ctta data get imagenet-c/digital"):
            continual(ImageNetC(imagenet, images=listing), names=NAMES)
    with pytest.raises(DataError):
        ImageNetC(imagenet, images=tmp_path / "nowhere.txt")
    for corruption, words in (("fog", "ctta data get imagenet-c/weather"), ("rust", "ImageNet-C has no rust")):
        with pytest.raises(DataError, match=f"{corruption}/5 is missing.*{words}.*ctta corrupt SRC DST"):
            continual(ImageNetC(imagenet), names=[corruption])


def test_imagenet_c_without_a_list_is_shuffled(imagenet: Path, tmp_path: Path) -> None:
    """Class by class, batch statistics would be those of one class; every domain has the same order."""

    def read_order(**settings: Any) -> list[list[str]]:
        domains = [ImageNetC(imagenet, **settings).domain(name, 5) for name in NAMES]
        return [[f"{path.parent.name}/{path.name}" for path in domain.paths] for domain in domains]

    for label, name in enumerate(("n01", "n02")):
        for index in range(3, 12):
            for corruption in NAMES:
                save_image(imagenet / corruption / "5" / name / f"{index}.JPEG", 40 * label + index, size=(224, 224))
    first, second = read_order()
    by_name = read_order(order="name")[0]
    assert first == second and sorted(first) == sorted(by_name) and by_name == read_order(order="name")[1]
    assert sum(one[:3] != other[:3] for one, other in pairwise(first)) > 5
    assert sum(one[:3] != other[:3] for one, other in pairwise(by_name)) == 1
    assert read_order(seed=1)[0] != first
    (batch, *_) = continual(ImageNetC(imagenet), names=NAMES, batch_size=24)
    assert [("n01", "n02")[label] for label in labels_of(batch).tolist()] == [name[:3] for name in first]
    listing = tmp_path / "list.txt"
    listing.write_text("n02/2.JPEG\nn01/0.JPEG\n")
    with pytest.raises(ConfigError):
        ImageNetC(imagenet, images=listing, order="shuffle")
    with pytest.raises(ConfigError):
        read_order(order="random")


def test_double_resize_matches_the_reference_implementation(tmp_path: Path) -> None:
    path = tmp_path / "contrast" / "5" / "n01" / "a.png"
    path.parent.mkdir(parents=True)
    gradient = np.add.outer(np.arange(224), np.arange(224))[..., None] * [1, 2, 3] % 256
    image = Image.fromarray(gradient.astype(np.uint8))
    image.save(path)
    twice = image.resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
    for double, expected in ((True, twice), (False, image)):
        (batch,) = continual(ImageNetC(tmp_path, double_resize=double), names=["contrast"])
        torch.testing.assert_close(batch.x[0], torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255)
    assert not np.array_equal(np.asarray(twice), np.asarray(image))


def test_invalid_selection(tmp_path: Path) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("\n")
    with pytest.raises(DataError):
        ImageNetC(tmp_path, images=listing)
    listing.write_text("n01/0.JPEG\n")
    with pytest.raises(ConfigError):
        ImageNetC(tmp_path, images=listing, num_per_class=1)
    with pytest.raises(ConfigError):
        ImageNetC(tmp_path, num_per_class=0)


def test_groups_in_their_own_folders(imagenet: Path, tmp_path: Path) -> None:
    """The downloads leave each group in its own folder."""
    root = tmp_path / "imagenet-c"
    for group in ("digital/contrast", "weather/brightness"):
        (root / group).mkdir(parents=True)
        (root / group / "5").symlink_to(imagenet / "contrast" / "5")
    stream = continual(ImageNetC(root, num_per_class=1), names=("contrast", "brightness"))
    assert [batch.domain for batch in stream] == ["contrast 5", "brightness 5"]
    with pytest.raises(DataError, match="imagenet-c/weather"):
        continual(ImageNetC(root), names=("fog",))


def test_interrupted_unpacking_is_not_read(imagenet: Path, tmp_path: Path) -> None:
    root = tmp_path / "groups"
    (root / "noise").mkdir(parents=True)
    (root / ".digital.unpacking").mkdir()
    (imagenet / "contrast").rename(root / ".digital.unpacking" / "contrast")
    with pytest.raises(DataError):
        continual(ImageNetC(root), names=["contrast"])
    (root / ".digital.unpacking").rename(root / "digital")
    assert len(continual(ImageNetC(root), names=["contrast"])) == 1


def test_class_missing_in_one_domain(imagenet: Path, tmp_path: Path) -> None:
    (imagenet / "brightness" / "5" / "n00").mkdir()
    listing = tmp_path / "list.txt"
    listing.write_text("n02/2.JPEG\nn01/0.JPEG\n")
    with pytest.raises(DataError):
        continual(ImageNetC(imagenet, images=listing), names=NAMES)
    with pytest.raises(DataError):
        continual(ImageNetC(imagenet), names=["brightness"])


def test_labels_do_not_shift(imagenet: Path) -> None:
    before = continual(ImageNetC(imagenet), names=NAMES, batch_size=6)
    (imagenet / "contrast" / "5" / "__MACOSX").mkdir()
    after = continual(ImageNetC(imagenet), names=NAMES, batch_size=6)
    assert [labels_of(batch).tolist() for batch in after] == [labels_of(batch).tolist() for batch in before]
    assert after.hash == before.hash
    save_image(imagenet / "brightness" / "5" / "n01" / "0.JPEG", 99, size=(224, 224))
    assert continual(ImageNetC(imagenet), names=NAMES, batch_size=6).hash != before.hash
    (imagenet / "brightness" / "5" / "n02" / "1.JPEG").unlink()
    with pytest.raises(DataError):
        continual(ImageNetC(imagenet), names=NAMES)
