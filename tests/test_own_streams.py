"""Streams over the user's own images: cameras, folders, arrays."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ctta import streams
from ctta.datasets import ImageNetC
from ctta.errors import DataError
from ctta.streams import continual, correlated, in_memory, live, mixed

FRAMES = np.random.default_rng(0).integers(0, 256, (7, 4, 6, 3), np.uint8)
AS_FLOATS = torch.from_numpy(FRAMES).permute(0, 3, 1, 2) / 255

# --- live frames ---


def test_live_frames_come_in_batches_without_labels() -> None:
    stream = live(iter(FRAMES), batch_size=3, name="door")
    batches = list(stream)
    assert [len(batch.x) for batch in batches] == [3, 3, 1], "the last, incomplete batch is given"
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), AS_FLOATS)
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(7))
    assert all(batch.y is None and batch.domain == "door" for batch in batches)
    assert batches[0].domains == ("door",) * 3
    assert stream.domains == ["door"]
    assert list(stream) == [], "a camera is gone through once"


@pytest.mark.parametrize(
    "kind",
    [
        lambda frame: frame,
        lambda frame: frame[:, :, ::-1].copy()[:, :, ::-1],  # what OpenCV's users write, with strides torch refuses
        Image.fromarray,
        lambda frame: torch.from_numpy(frame).permute(2, 0, 1) / 255,
        lambda frame: torch.from_numpy(frame).permute(2, 0, 1).double() / 255,
    ],
)
def test_live_frames_of_every_kind(kind) -> None:
    (batch,) = live([kind(frame) for frame in FRAMES], batch_size=7)
    assert batch.x.dtype == torch.float32
    torch.testing.assert_close(batch.x, AS_FLOATS)


@pytest.mark.parametrize("floats", [False, True])
def test_a_camera_may_write_over_its_last_frame(floats: bool) -> None:
    def camera() -> Iterator[object]:
        buffer = np.zeros((4, 6, 3), np.float32 if floats else np.uint8)
        frame = torch.from_numpy(buffer).permute(2, 0, 1) if floats else buffer
        for pixels in FRAMES:
            buffer[:] = pixels / np.float32(255) if floats else pixels
            yield frame

    (batch,) = live(camera(), batch_size=7)
    torch.testing.assert_close(batch.x, AS_FLOATS)


def test_a_live_stream_takes_no_more_frames_than_it_gives() -> None:
    camera = iter(FRAMES)
    stream = live(camera, batch_size=2)
    for batch in stream:
        assert len(batch.x) == 2
        if stream.position == 2:
            break
    assert np.array_equal(next(camera), FRAMES[4])
    assert next(stream).index.tolist() == [4, 5], "goes on after a break"
    assert stream.position == 3


def test_frames_before_an_error_of_the_camera_are_kept() -> None:
    class Flickering:
        def __init__(self) -> None:
            self.calls = 0

        def __iter__(self) -> "Flickering":
            return self

        def __next__(self) -> object:
            self.calls += 1
            if self.calls == 2:
                raise OSError("no signal")
            return None if self.calls == 4 else FRAMES[self.calls]

    stream = live(Flickering(), batch_size=3)
    with pytest.raises(OSError, match="no signal"):
        next(stream)
    with pytest.raises(ValueError, match="frame 2 of 'camera' is a NoneType"):
        next(stream)
    torch.testing.assert_close(next(stream).x, AS_FLOATS[[1, 3, 5]])


def test_a_live_stream_promises_nothing_it_cannot_keep() -> None:
    stream = live(FRAMES, batch_size=2)
    with pytest.raises(TypeError):
        len(stream)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="frames are gone"):
        stream.position = 1
    assert not hasattr(stream, "hash")
    with pytest.raises(ValueError, match="batch_size"):
        live(FRAMES, batch_size=0)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (np.zeros((4, 6), np.uint8), r"uint8 \(4, 6\)"),
        (np.zeros((4, 6, 3)), r"float64 \(4, 6, 3\)"),
        (np.zeros((4, 6, 4), np.uint8), r"\(4, 6, 4\)"),
        (torch.zeros(3, 4, 6, dtype=torch.uint8), r"torch\.uint8"),
        (torch.zeros(4, 6, 3), r"float tensor \(3, H, W\)"),
        (torch.full((3, 4, 6), 128.0), r"from 128 to 128; expected \[0, 1\]"),
        (torch.full((3, 4, 6), -0.5), r"from -0\.5"),
        (torch.full((3, 4, 6), float("nan")), "nan"),
        (FRAMES[0, :2], r"frame 1 .* has \(2, 6\) pixels and those before it \(4, 6\)"),
        (Image.new("F", (6, 4)), "frame 1 of 'camera' has 32 bits"),
        ("a.png", "'a.png'"),
    ],
)
def test_frames_that_are_none(frame, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(live([FRAMES[0], frame], batch_size=2))


# --- arrays ---


def test_arrays_in_memory() -> None:
    labels = np.arange(7) % 3
    stream = in_memory(FRAMES, labels, name="clean", batch_size=4)
    assert stream.domains == ["clean"]
    batches = list(stream)
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), AS_FLOATS)
    assert torch.cat([batch.y for batch in batches]).tolist() == labels.tolist()
    for batch in mixed(stream):
        torch.testing.assert_close(batch.x, AS_FLOATS[batch.index])
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


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (FRAMES / 255, None, r"uint8 \(N, H, W, 3\), got float64"),
        (AS_FLOATS, None, r"got torch.float32 \(7, 3, 4, 6\)"),
        ([1, 2], None, "got list"),
        (FRAMES, [1, 2], "one whole number per image"),
        (FRAMES, np.zeros(7), "one whole number per image"),
        (FRAMES[:0], None, "no images"),
    ],
)
def test_arrays_that_are_none(images, labels, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        in_memory(images, labels, name="x")


# --- folders ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number, label in enumerate(("cat", "dog")):
        for picture in range(3):
            path = tmp_path / "pets" / label / f"{picture}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8 + picture, 6), (100 * number, picture, 0)).save(path)
    return tmp_path / "pets"


def test_a_labelled_folder_is_a_stream(tree: Path) -> None:
    stream = streams.image_folder(tree, size=(4, 5), batch_size=4)
    batches = list(stream)
    assert stream.domains == ["pets"]
    assert stream.read_ahead > 0
    assert [batch.y.tolist() for batch in batches] == [[0, 0, 0, 1], [1, 1]]
    assert batches[0].x.shape == (4, 3, 4, 5)
    assert (batches[0].x[:, 0, 0, 0] * 255).round().tolist() == [0, 0, 0, 100]
    assert sorted(label for batch in correlated(stream) for label in batch.y.tolist()) == [0, 0, 0, 1, 1, 1]
    (first,) = streams.image_folder(tree, per_class=1, name="my pets")
    assert first.y.tolist() == [0, 1]
    assert first.domain == "my pets"
    (chosen,) = streams.image_folder(tree, images=["dog/1.png", "cat/1.png"])
    assert chosen.y.tolist() == [1, 0]
    with pytest.raises(DataError, match="give size="):
        list(streams.image_folder(tree))
    assert streams.image_folder(tree, size=(4, 6), batch_size=4).hash != stream.hash


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"per_class": 1, "images": ["cat/0.png"]}, "per_class or images, not both"),
        ({"per_class": 0}, "None for all pictures.* at least 1, got 0"),
        ({"per_class": -1}, "got -1"),
        ({"images": []}, "at least one entry"),
        ({"images": "cat/0.png"}, "must be a list"),
        ({"images": ["0.png"]}, "<class>/<picture>"),
        ({"images": ["../pets/cat/0.png"]}, "below the tree's root"),
        ({"images": ["cat/../../pets/cat/0.png"]}, "below the tree's root"),
        ({"images": ["/etc/passwd"]}, "below the tree's root"),
        ({"transform": lambda picture: picture}, "transform_name="),
        ({"transform_name": "crop"}, "transform_name="),
        ({"size": (4, 4), "transform": lambda picture: picture, "transform_name": "same"}, "not both"),
    ],
)
def test_mistakes_about_a_labelled_folder(tree: Path, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        streams.image_folder(tree, **settings)


def test_imagenet_c_says_at_once_what_is_unclear(tmp_path: Path) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("\n")
    with pytest.raises(DataError, match=r"list\.txt lists no pictures"):
        ImageNetC(tmp_path, images=listing)
    listing.write_text("n01/0.JPEG\n")
    with pytest.raises(ValueError, match="not both"):
        ImageNetC(tmp_path, images=listing, per_class=1)
    with pytest.raises(ValueError, match="per_class"):
        ImageNetC(tmp_path, per_class=0)


def test_imagenet_c_as_the_downloads_leave_it(tree: Path) -> None:
    """Each group in a folder of its own."""
    root = tree.parent / "imagenet-c"
    for place in ("digital/contrast", "weather/brightness"):
        (root / place).mkdir(parents=True)
        (root / place / "5").symlink_to(tree)
    stream = continual(ImageNetC(root, per_class=1), names=("contrast", "brightness"))
    assert [batch.domain for batch in stream] == ["contrast 5", "brightness 5"]
    with pytest.raises(DataError, match=r"imagenet-c/fog/5 is missing.*ctta data get imagenet-c/weather"):
        continual(ImageNetC(root), names=("fog",))


def test_hidden_files_are_no_pictures(tree: Path) -> None:
    before = streams.folder(tree, size=(4, 5)), streams.image_folder(tree, size=(4, 5))
    for place in ("cat/._0.png", ".trash/0.png", "__MACOSX/cat/0.png", "cat/.thumbnails/0.png"):
        (tree / place).parent.mkdir(parents=True, exist_ok=True)
        (tree / place).write_bytes(b"not for people")
    after = streams.folder(tree, size=(4, 5)), streams.image_folder(tree, size=(4, 5))
    assert [stream.hash for stream in after] == [stream.hash for stream in before]
    hidden = tree.rename(tree.parent / ".cache")
    assert len(streams.folder(hidden).segments[0].rows) == 6, "where the folder itself lies does not matter"


def test_a_folder_is_called_by_its_name_wherever_one_stands(tree: Path, monkeypatch) -> None:
    monkeypatch.chdir(tree)
    assert streams.folder(".").domains == streams.image_folder(".").domains == ["pets"]
    assert streams.folder("../pets/cat/..").domains == ["pets"]


def test_anymaps_are_pictures(tmp_path: Path) -> None:
    Image.fromarray(FRAMES[0]).save(tmp_path / "a.ppm")
    Image.fromarray(FRAMES[0, :, :, 1]).save(tmp_path / "b.pgm")
    (batch,) = streams.folder(tmp_path)
    torch.testing.assert_close(batch.x[0], AS_FLOATS[0])
    torch.testing.assert_close(batch.x[1], AS_FLOATS[0, 1].expand(3, 4, 6))


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_pictures_of_phones_are_turned_upright(tmp_path: Path, tag: int, ending: str) -> None:
    """The tag says where the first stored row and column lie in the scene."""
    scene = np.zeros((16, 32, 3), np.uint8)
    scene[:8, :16] = 200  # bright at the upper left
    flipped = {1: "", 2: "x", 3: "xy", 4: "y", 5: "t", 6: "ty", 7: "txy", 8: "tx"}[tag]
    stored = scene.transpose(1, 0, 2) if "t" in flipped else scene
    stored = stored[:, ::-1] if "x" in flipped else stored
    stored = stored[::-1] if "y" in flipped else stored
    exif = Image.Exif()
    exif[0x0112] = tag
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / f"a.{ending}", exif=exif)
    (batch,) = streams.folder(tmp_path)
    assert batch.x.shape == (1, 3, 16, 32)
    bright = torch.from_numpy(scene[:, :, 0] > 100)
    assert torch.equal(batch.x[0, 0] > 0.4, bright)
    with Image.open(tmp_path / f"a.{ending}") as picture:
        (frame,) = live([picture])
    assert torch.equal(frame.x, batch.x)


def test_a_tag_that_cannot_be_read_is_no_reason_to_refuse(tmp_path: Path) -> None:
    Image.new("RGB", (8, 6), (255, 0, 0)).save(tmp_path / "a.png", exif=b"Exif\0\0garbage")
    (batch,) = streams.folder(tmp_path)
    assert batch.x.shape == (1, 3, 6, 8)
