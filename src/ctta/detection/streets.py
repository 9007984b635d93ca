"""The small detector of cars and people on drawn streets that ships with the library."""

from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files

import torch
from safetensors.torch import load_file
from torch import Tensor

from ctta.data.streets import render_frame
from ctta.detection.boxes import Boxes
from ctta.detection.yolov5 import YOLOv5, YOLOv5Detector

#: Means of the boxes of 250 frames of the split "train" at 192x384.
_ANCHORS = (((11, 8), (6, 16), (14, 15)), ((17, 12), (10, 27), (27, 20)), ((16, 41), (50, 32), (93, 62)))


def build_street_network() -> YOLOv5:
    """Return the network of :func:`street_detector` with random weights."""
    return YOLOv5(2, width=0.125, anchors=_ANCHORS, gains=(0.05, 1.0, 0.1))


def street_detector() -> YOLOv5Detector:
    """Return a detector of the classes :data:`ctta.data.streets.BOX_CLASSES`, trained on drawn streets by day.

    It is a YOLOv5 with an eighth of the largest network's channels and 0.45 million parameters, for images of about
    192x384 pixels; ``PROVENANCE.md`` beside the weights of ``ctta.models`` documents its training.

    >>> import torch
    >>> detector = street_detector()
    >>> len(detector.predict(torch.rand(1, 3, 192, 384)))
    1
    """
    net = build_street_network()
    with as_file(files("ctta.detection") / "streets.safetensors") as path:
        weights = {name: value.float() for name, value in load_file(path).items()}
    net.load_state_dict(weights, strict=False)  # without the counters of BatchNorm, which nothing reads
    return YOLOv5Detector(net).eval()


def draw_street_batches(
    conditions: Sequence[str],
    num_frames: int,
    *,
    batch_size: int = 4,
    split: str = "report",
    seed: int = 0,
    size: tuple[int, int] = (192, 384),
) -> Iterator[tuple[Tensor, list[Boxes], str]]:
    """Draw a stream of street scenes, each shown once, with the boxes of its cars and people.

    Args:
        conditions: The weather or light of each part of the stream, such as clear, night and clear again.
        num_frames: How many frames each part has.
        batch_size: Frames in a batch.
        split: "train", "choose" or "report", see :data:`ctta.data.streets.SPLITS`.
        seed: Seed of the scenes.
        size: Height and width in pixels.

    Yields:
        Images (N, 3, H, W) in [0, 1], the boxes of each, and the name of the part: its number and condition.

    >>> x, targets, part = next(draw_street_batches(["clear", "night"], 4, size=(64, 128)))
    >>> tuple(x.shape), len(targets), part
    ((4, 3, 64, 128), 4, '1 clear')
    """
    for part, condition in enumerate(conditions):
        for start in range(0, num_frames, batch_size):
            count = min(batch_size, num_frames - start)
            first = part * num_frames + start
            frames = [render_frame(first + n, condition, split=split, seed=seed, size=size) for n in range(count)]
            images = torch.stack([torch.from_numpy(frame.image) for frame in frames]).permute(0, 3, 1, 2)
            found = [tuple(map(torch.from_numpy, frame.find_boxes())) for frame in frames]
            targets = [Boxes(boxes=boxes, labels=labels) for boxes, labels in found]
            yield images.float() / 255, targets, f"{part + 1} {condition}"
