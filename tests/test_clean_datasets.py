"""Corruption protocols over the images of any stream: a folder, arrays, or something that is neither."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ctta.data import datasets
from ctta.data.corruptions import corrupt
from ctta.data.datasets import ArrayDataset
from ctta.data.streams import continual, gradual, image_folder, in_memory, mixed
from ctta.data.streams.sequences import StreamDataset
from ctta.errors import ConfigError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def write_tree(root: Path) -> Path:
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        (root / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / f"class{label}" / f"{number:02}.png")
    return root


def test_a_folder_of_clean_images_is_corrupted(tmp_path: Path) -> None:
    clean = image_folder(write_tree(tmp_path / "val"), batch_size=4)
    stream = continual(clean, names=("fog", "contrast"), severity=3)
    assert stream.domains == ["fog 3", "contrast 3"]
    assert (len(stream), stream.batch_size) == (6, 4)  # the batches of the folder
    images = [image for batch in clean for image in batch.x]
    corrupted = [(batch.domain, image) for batch in stream for image in batch.x]
    assert (
        torch.cat([batch.y for batch in clean if batch.y is not None]).tolist() * 2
        == torch.cat([batch.y for batch in stream if batch.y is not None]).tolist()
    )
    index = np.concatenate([batch.index.numpy() for batch in clean])
    for place, (image, number) in enumerate(zip(images, index, strict=True)):
        domain, pixels = corrupted[len(images) + place]
        assert domain == "contrast 3"
        assert torch.equal(pixels, corrupt(image[None], "contrast", 3, index=[number])[0])


def test_arrays_in_memory_give_the_pixels_of_the_dataset() -> None:
    """The same images, as a stream and as a dataset."""
    one = continual(in_memory(PIXELS, LABELS, name="mine"), names=("gaussian_noise",), batch_size=6)
    other = continual(ArrayDataset(PIXELS, LABELS, name="mine"), names=("gaussian_noise",), batch_size=6)
    for batch, expected in zip(one, other, strict=True):
        assert torch.equal(batch.x, expected.x) and batch.y is not None and expected.y is not None
        assert torch.equal(batch.y, expected.y)


def test_an_image_has_the_same_noise_wherever_a_shuffle_puts_it() -> None:
    clean = in_memory(PIXELS, LABELS, name="mine", batch_size=12)
    (straight,) = continual(clean, names=("gaussian_noise",))
    (shuffled,) = continual(mixed(clean, seed=1), names=("gaussian_noise",))
    rows = np.random.default_rng(1).permutation(12)
    assert torch.equal(shuffled.x, straight.x[torch.from_numpy(rows)])
    assert straight.y is not None and shuffled.y is not None
    assert shuffled.y.tolist() == straight.y[torch.from_numpy(rows)].tolist()


def test_hashes_differ_by_corruption_images_and_order() -> None:
    clean = in_memory(PIXELS, LABELS, name="mine", batch_size=12)
    streams = [
        continual(clean, names=("fog",)),
        continual(clean, names=("fog",), severity=4),
        continual(clean, names=("snow",)),
        continual(mixed(clean), names=("fog",)),
        continual(in_memory(PIXELS[::-1].copy(), LABELS, name="mine", batch_size=12), names=("fog",)),
    ]
    assert len({stream.hash for stream in streams}) == len(streams)
    assert continual(clean, names=("fog",)).hash == streams[0].hash


def test_gradual_takes_a_stream_too() -> None:
    assert len(gradual(in_memory(PIXELS, LABELS, name="mine", batch_size=12), names=("fog",))) == 9


@pytest.mark.parametrize("data", ["val", Path("val"), [(PIXELS, LABELS)], PIXELS])
def test_anything_else_is_told_what_to_use(data: Any) -> None:
    with pytest.raises(TypeError, match="image_folder"):
        continual(data)


def test_fractional_severities_and_two_corruptions_in_turn() -> None:
    data, clean = ArrayDataset(PIXELS, LABELS, name="mine", seed=3), in_memory(PIXELS, LABELS, name="mine")
    rows = np.array([7, 2])
    first = corrupt(PIXELS, "fog", 2.25, seed=3)
    second = corrupt(first, "gaussian_noise", 1.5, seed=3)
    for source in (data, StreamDataset(clean, seed=3)):
        domain = source.combine(("fog", 2.25), ("gaussian_noise", 1.5))
        assert domain.name.endswith(" fog 2.25 + gaussian_noise 1.5")
        x, y = domain.read(rows)
        assert torch.equal(x, torch.from_numpy(second[rows]).permute(0, 3, 1, 2) / 255)
        assert y is not None and y.tolist() == LABELS[rows].tolist()
        x, _ = source.combine().read(rows)
        assert torch.equal(x, torch.from_numpy(PIXELS[rows]).permute(0, 3, 1, 2) / 255)
    (batch,) = continual(data, names=("fog",), severity=2.25, batch_size=12)
    assert batch.domain == "fog 2.25"
    assert torch.equal(batch.x, torch.from_numpy(first).permute(0, 3, 1, 2) / 255)


def test_a_visit_has_draws_of_its_own() -> None:
    data, rows = ArrayDataset(PIXELS, LABELS, name="mine"), np.arange(2)
    domains = [data.combine(("gaussian_noise", 5), visit=visit) for visit in (None, 0, 1)]
    images = [domain.read(rows)[0] for domain in domains]
    assert len({domain.name for domain in domains}) == 3
    assert all(not torch.equal(images[a], images[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(domains[1].read(rows[1:])[0], images[1][1:])


def test_whole_severities_have_one_name() -> None:
    data = ArrayDataset(PIXELS, LABELS, name="mine")
    assert data.domain("fog", 2.0).name == data.domain("fog", np.float64(2)).name == data.domain("fog", 2).name
    assert continual(data, severity=2.0).hash == continual(data, severity=2).hash


def test_a_corruption_cannot_come_twice() -> None:
    with pytest.raises(ConfigError):
        ArrayDataset(PIXELS, LABELS, name="mine").combine(("fog", 1), ("fog", 2))


@pytest.mark.parametrize(
    ("old", "new"), [("Corrupted", "ArrayDataset"), ("CorruptedFolder", "FolderDataset"), ("Images", "ImageDomain")]
)
def test_classes_keep_their_old_names(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
        assert getattr(datasets, old) is getattr(datasets, new)
