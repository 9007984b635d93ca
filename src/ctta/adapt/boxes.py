"""Adapt a detector to a video, write its boxes, and show them beside those of the source."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ctta.adapt.options import VideoOptions
from ctta.adapt.predictions import PredictionFile
from ctta.adapt.video import FRAME, KEY, SECONDS, TEXT_COLOR, TIME, AnnotatedVideo, draw_lines, format_times
from ctta.core.options import refuse_options, takes_options
from ctta.data.datasets.video import clip_rate, describe_address, estimate_num_frames, import_av
from ctta.data.streams import VideoBatch, video
from ctta.detection import DEFAULT_DETECTION_METHOD, Boxes, DetectionModel, detect
from ctta.detection.boxes import select_boxes
from ctta.detection.drawing import draw_boxes
from ctta.errors import ConfigError
from ctta.evaluation.steps import feed
from ctta.nn.surgery import find_weight

#: Boxes with lower scores are neither written nor drawn.
MIN_SCORE = 0.25
#: Options of videos that do not apply to detectors.
REFUSED = ("state", "guard", "escape_formulas")


@dataclass(frozen=True)
class BoxSummary:
    """What a call of :func:`adapt_video_boxes` did.

    Attributes:
        num_images: Frames that were processed.
        num_boxes: Boxes in the table.
        num_source_boxes: Boxes that the source found with such scores; None if it was not asked.
        seconds: Duration of the processing.
        method: Name of the method.
    """

    num_images: int
    num_boxes: int
    num_source_boxes: int | None
    seconds: float
    method: str


@takes_options(VideoOptions)
def adapt_video_boxes(
    detector: nn.Module, clip: str | os.PathLike[str], out: str | os.PathLike[str], options: VideoOptions
) -> BoxSummary:
    """Find objects in the frames of a video while adapting, and write a CSV file; needs the extra ``video``.

    A state is not saved, and there is no guard.

    Args:
        detector: As :func:`ctta.detect` takes it.
        clip: File, numbered images, device or address, as for :func:`ctta.data.streams.video`.
        out: CSV file to write, with a row for each box with a score of at least 0.25: video, batch, frame, seconds
            (time for a camera), class, name if ``classes`` are given, score, and left, top, right and bottom in pixels
            of the frame.
        options: The fields of :class:`VideoOptions` as keywords. ``annotate`` is a video with the source's boxes at the
            left and the adapted ones at the right.

    Returns:
        What this call did.

    Raises:
        ConfigError: An argument is not valid, or a file exists.
        DataError: The video cannot be read.
        ImportError: PyAV is not installed.
    """
    import_av()
    refuse_options(options, REFUSED, "ctta adapt --task detection", "leave it out")
    path, name = Path(out), describe_address(clip)
    if path.exists():
        raise ConfigError(f"{path} exists: choose another file, or delete it")
    method = options.method or DEFAULT_DETECTION_METHOD
    model = detect(detector, method, **options.settings or {})
    source = detect(detector, "source") if options.compare or options.annotate else None
    stream = video(
        clip,
        every=options.every,
        interval=options.interval,
        seconds=options.seconds,
        size=options.size,
        batch_size=options.batch_size,
    )
    stream.on_wait, stream.on_change = options.on_wait, options.on_change
    classes = options.classes or ()
    columns = ["class", *(["name"] if classes else []), "score", "left", "top", "right", "bottom"]
    file = PredictionFile(path, [FRAME, TIME if stream.is_live else SECONDS, *columns], key=KEY)
    num_expected = None if stream.is_live else estimate_num_frames(clip, stream.sampling)
    num_images = num_boxes = num_source_boxes = 0
    with ExitStack() as stack:
        writer = None
        if options.annotate is not None:
            rate, target = clip_rate(clip, stream.sampling), Path(options.annotate)
            writer = stack.enter_context(closing(AnnotatedVideo(target, rate, classes, step=0, keep_unsaved=True)))
        file.create()
        device, start = find_weight(model.source).device, time.perf_counter()
        for number, batch in enumerate(stream if stream.is_live else feed(stream, device)):
            after = _find(model, batch)
            times = format_times(batch, is_live=stream.is_live)
            file.append(
                [name, number, frame, moment, *row]
                for frame, moment, found in zip(batch.index.tolist(), times, after, strict=True)
                for row in _list_rows(found, classes)
            )
            num_images += len(batch.x)
            num_boxes += sum(len(found["boxes"]) for found in after)
            if source is not None:
                before = _find(source, batch)
                num_source_boxes += sum(len(found["boxes"]) for found in before)
                if writer is not None:
                    for frame, *pair in zip(batch.frames, before, after, strict=True):
                        writer.append(_draw(frame, *pair))
            if options.on_progress:
                options.on_progress(num_images, None if num_expected is None else max(num_expected, num_images))
        file.flush_to_disk()
        seconds = time.perf_counter() - start
    return BoxSummary(num_images, num_boxes, None if source is None else num_source_boxes, seconds, method)


def _find(model: DetectionModel, batch: VideoBatch) -> list[Boxes]:
    """Return the boxes of each frame, in its pixels and on the CPU."""
    height, width = batch.x.shape[2:]
    found = []
    for each, frame in zip(model(batch.x), batch.frames, strict=True):
        kept = select_boxes(each, each["scores"] >= MIN_SCORE)
        factors = kept["boxes"].new_tensor([frame.shape[1] / width, frame.shape[0] / height] * 2)
        found.append(
            Boxes(
                boxes=(kept["boxes"] * factors).cpu(),
                labels=kept["labels"].cpu(),
                scores=kept["scores"].cpu(),
            )
        )
    return found


def _list_rows(found: Boxes, classes: Sequence[str]) -> list[list[object]]:
    """Return the columns of each box."""
    rows = zip(found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True)
    return [
        [label, *([classes[label]] if classes else []), f"{score:.4f}", *(f"{side:.1f}" for side in box)]
        for label, score, box in rows
    ]


def _draw(frame: NDArray[np.uint8], before: Boxes, after: Boxes) -> NDArray[np.uint8]:
    """Return the boxes of the source and the adapted ones beside each other, under the number of each."""
    panels = []
    for title, found in (("source", before), ("adapted", after)):
        strip = draw_lines(frame.shape[1], [(title, f"{len(found['boxes'])} objects", TEXT_COLOR)])
        panels.append(np.concatenate([strip, draw_boxes(frame, found, min_score=MIN_SCORE)]))
    return np.concatenate(panels, 1)
