"""Tests of live streams: frames that arrive one by one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import FRAMES, FRAMES_AS_FLOATS

from ctta.data.streams import live
from ctta.errors import ConfigError, InputError


def test_frames_are_batched_without_labels() -> None:
    stream = live(iter(FRAMES), batch_size=3, name="door")
    batches = list(stream)
    assert [len(batch.x) for batch in batches] == [3, 3, 1], "the last batch may be smaller"
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), FRAMES_AS_FLOATS)
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(7))
    assert all(batch.y is None and batch.domain == "door" for batch in batches)
    assert batches[0].domains == ("door",) * 3
    assert stream.domains == ["door"]
    assert list(stream) == [], "single-pass"


@pytest.mark.parametrize(
    "convert",
    [
        lambda frame: frame,
        lambda frame: frame[:, :, ::-1].copy()[:, :, ::-1],  # usual with OpenCV, with strides that torch refuses
        Image.fromarray,
        lambda frame: torch.from_numpy(frame).permute(2, 0, 1) / 255,
        lambda frame: torch.from_numpy(frame).permute(2, 0, 1).double() / 255,
    ],
)
def test_kinds_of_frames(convert: Callable[[Any], Any]) -> None:
    (batch,) = live([convert(frame) for frame in FRAMES], batch_size=7)
    assert batch.x.dtype == torch.float32
    torch.testing.assert_close(batch.x, FRAMES_AS_FLOATS)


@pytest.mark.parametrize("floats", [False, True])
def test_camera_may_reuse_its_buffer(floats: bool) -> None:
    def camera() -> Iterator[object]:
        buffer = np.zeros((4, 6, 3), np.float32 if floats else np.uint8)
        frame = torch.from_numpy(buffer).permute(2, 0, 1) if floats else buffer
        for pixels in FRAMES:
            buffer[:] = pixels / np.float32(255) if floats else pixels
            yield frame

    (batch,) = live(camera(), batch_size=7)
    torch.testing.assert_close(batch.x, FRAMES_AS_FLOATS)


def test_no_more_frames_are_taken_than_yielded() -> None:
    camera = iter(FRAMES)
    stream = live(camera, batch_size=2)
    for batch in stream:
        assert len(batch.x) == 2
        if stream.position == 2:
            break
    assert np.array_equal(next(camera), FRAMES[4])
    assert next(stream).index.tolist() == [4, 5], "continues after a break"
    assert stream.position == 3


def test_frames_before_a_camera_error_are_kept() -> None:
    class Unreliable:
        def __init__(self) -> None:
            self.num_calls = 0

        def __iter__(self) -> "Unreliable":
            return self

        def __next__(self) -> object:
            self.num_calls += 1
            if self.num_calls == 2:
                raise OSError("no signal")
            return None if self.num_calls == 4 else FRAMES[self.num_calls]

    stream = live(Unreliable(), batch_size=3)
    with pytest.raises(OSError, match="no signal"):
        next(stream)
    with pytest.raises(InputError):
        next(stream)
    torch.testing.assert_close(next(stream).x, FRAMES_AS_FLOATS[[1, 3, 5]])


def test_single_pass_has_no_length_hash_or_settable_position() -> None:
    stream = live(FRAMES, batch_size=2)
    with pytest.raises(TypeError):
        len(stream)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="frames are not kept"):
        stream.position = 1
    assert not hasattr(stream, "hash")
    with pytest.raises(ConfigError):
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
        (FRAMES[0, :2], r"frame 1 .* has \(2, 6\) pixels and the frames before it \(4, 6\)"),
        (Image.new("F", (6, 4)), "frame 1 of 'camera' has 32 bits"),
        ("a.png", "'a.png'"),
    ],
)
def test_invalid_frames(frame: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        next(live([FRAMES[0], frame], batch_size=2))
