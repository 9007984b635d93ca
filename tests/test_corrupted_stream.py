"""Corruption protocols over the images of any stream: a folder, arrays, or something that is neither."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ctta.corruptions import corrupt
from ctta.datasets import Corrupted
from ctta.streams import continual, gradual, image_folder, in_memory, mixed

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
    other = continual(Corrupted(PIXELS, LABELS, name="mine"), names=("gaussian_noise",), batch_size=6)
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
    with pytest.raises(
        TypeError, match=r"continual needs a dataset .* image_folder\(path.* in_memory\(.*got \w+: wrap"
    ):
        continual(data)
