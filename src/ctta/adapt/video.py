"""Adapt a network to a video and write a prediction for each frame; a recording is resumable at any frame."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ctta.adapt.options import VideoOptions
from ctta.adapt.predictions import CHANGED, PredictionFile, Predictions, answer_columns
from ctta.adapt.resume import check_arguments, open_run
from ctta.adapt.run import InferenceBatch, InferenceSummary
from ctta.core.options import takes_options
from ctta.data.datasets.video import clip_rate, describe_address, estimate_num_frames, import_av
from ctta.data.streams import VideoBatch, VideoStream, video
from ctta.distributed import world_size
from ctta.errors import ConfigError
from ctta.evaluation.steps import feed
from ctta.io.atomic import atomic_write, fsync_file
from ctta.io.images import import_pillow
from ctta.nn.surgery import find_weight

#: Encoders in the order of preference, with their options; without B-frames, packets are in the order of the frames.
ENCODERS = {"libx264": {"crf": "20", "preset": "veryfast", "bf": "0"}, "mpeg4": {"qscale": "3", "bf": "0"}}


MIN_WIDTH = 320  # pixels, below which frames are enlarged so that the text can be read
FONT_SIZE, LINE_HEIGHT, MARGIN = 15, 22, 6
BACKGROUND, TEXT_COLOR, CHANGED_COLOR = (24, 24, 27), (228, 228, 231), (250, 204, 21)


class AnnotatedVideo:
    """Draw the answers to every frame and append the image to a video file; resumable after a kill.

    A video file cannot be read before it is complete. So the images between two saved states are a file of their own
    in the folder ``<path>.parts``, complete before the state is saved, and :meth:`close` joins them without encoding
    anything again.

    Args:
        path: The file, such as ``out.mp4``.
        rate: Frames per second.
        classes: Class names, if known.
        step: Step that the run starts from: 0 for a new one; parts of later steps are dropped.
        keep_unsaved: Whether to keep images at the end that no saved state includes, as there is none.

    Raises:
        ConfigError: There is such a file, and the run is new.
    """

    def __init__(
        self, path: Path, rate: Fraction, classes: Sequence[str] | None, *, step: int, keep_unsaved: bool
    ) -> None:
        self.path, self.rate, self.classes, self.keep_unsaved = path, rate, tuple(classes or ()), keep_unsaved
        self.folder = path.with_name(f"{path.name}.parts")
        self._first_step, self._num_frames = step, 0
        self._output: Any = None
        self._stream: Any = None
        if step == 0 and path.exists():
            raise ConfigError(f"{path} exists, and the run is new: choose another file, or delete it")
        if step and path.exists():
            shutil.rmtree(self.folder, ignore_errors=True)  # of a call that was killed after it had joined them
            self.folder.mkdir()
            path.replace(self.folder / _part_name(0))  # of an earlier call, to which this one appends
        for part in self._list_parts():
            if int(part.stem) >= step:
                part.unlink()

    def add(self, frames: Sequence[NDArray[np.uint8]], adapted: Predictions, source: Predictions) -> None:
        """Append the frames of a batch, with the answers to them."""
        for row, frame in enumerate(frames):
            self.append(self._draw(frame, row, adapted, source))

    def append(self, image: NDArray[np.uint8]) -> None:
        """Append an image, uint8 (H, W, 3); all have the size of the first, made even."""
        av = import_av()
        if self._output is None:
            self._open(image)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        frame = frame.reformat(self._stream.width, self._stream.height, format="yuv420p")
        frame.pts, frame.time_base = self._num_frames, 1 / self.rate
        self._num_frames += 1
        self._output.mux(self._stream.encode(frame))

    def flush_to_disk(self, step: int) -> None:
        """Complete the file of the images so far; those after it belong to a step and later ones."""
        if self._output is not None:
            self._output.mux(self._stream.encode())
            self._output.close()
            fsync_file(self._current)
            self._output, self._num_frames = None, 0
        self._first_step = step

    def close(self) -> None:
        """Join the parts to one file."""
        if self._output is not None:
            self.flush_to_disk(self._first_step)
            if not self.keep_unsaved:
                self._current.unlink()
        parts = self._list_parts()
        if parts:
            with atomic_write(self.path) as temporary:
                self._join(parts, temporary)
            shutil.rmtree(self.folder)

    @property
    def _current(self) -> Path:
        return self.folder / _part_name(self._first_step)

    def _list_parts(self) -> list[Path]:
        return sorted(self.folder.glob("*.mp4"))

    def _open(self, image: NDArray[np.uint8]) -> None:
        av = import_av()
        name = next((name for name in ENCODERS if name in av.codecs_available), None)
        if name is None:
            raise ConfigError(f"PyAV was built without {' and '.join(ENCODERS)}: leave --annotate out, or reinstall it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._output = av.open(str(self._current), "w", format="mp4")
        self._stream = self._output.add_stream(name, rate=self.rate, options=ENCODERS[name])
        height, width = image.shape[:2]
        self._stream.height, self._stream.width = self._size_of_parts() or (height + height % 2, width + width % 2)
        self._stream.pix_fmt, self._stream.time_base = "yuv420p", 1 / self.rate

    def _size_of_parts(self) -> tuple[int, int] | None:
        """Return the (height, width) of earlier parts, as a video file has one size."""
        parts = [part for part in self._list_parts() if part != self._current]
        if not parts:
            return None
        with import_av().open(str(parts[0])) as container:
            return container.streams.video[0].height, container.streams.video[0].width

    def _join(self, parts: list[Path], path: Path) -> None:
        av, number = import_av(), 0
        with av.open(str(path), "w", format="mp4") as output:
            stream = None
            for part in parts:
                with av.open(str(part)) as container:
                    stream = stream or output.add_stream_from_template(container.streams.video[0])
                    for packet in container.demux(container.streams.video[0]):
                        if packet.dts is None:  # the end
                            continue
                        packet.stream, packet.time_base = stream, 1 / self.rate
                        packet.pts = packet.dts = number
                        packet.duration = 1
                        number += 1
                        output.mux(packet)

    def _draw(self, frame: NDArray[np.uint8], row: int, adapted: Predictions, source: Predictions) -> NDArray[np.uint8]:
        if adapted.label_maps is not None and source.label_maps is not None:
            return self._draw_maps(frame, source.label_maps[row], adapted.label_maps[row])
        answers = [(each.classes[row], each.confidences[row]) for each in (source, adapted)]
        texts = [f"{self._name(label)}  {confidence:.2f}" for label, confidence in answers]
        image = _enlarge(frame)
        lines = [("source", texts[0], TEXT_COLOR), ("adapted", texts[1], _color(answers[0][0] != answers[1][0]))]
        return np.concatenate([image, draw_lines(image.shape[1], lines)])

    def _draw_maps(self, frame: NDArray[np.uint8], source: Tensor, adapted: Tensor) -> NDArray[np.uint8]:
        share = float((source != adapted).float().mean())
        titles = ("source", "", TEXT_COLOR), ("adapted", f"{100 * share:.0f} % of the pixels differ", _color(share > 0))
        panels = []
        for labels, title in zip((source, adapted), titles, strict=True):
            image = self._blend(frame, labels.numpy())
            panels.append(np.concatenate([draw_lines(image.shape[1], [title]), image]))
        return np.concatenate(panels, axis=1)

    def _blend(self, frame: NDArray[np.uint8], labels: NDArray[np.int64]) -> NDArray[np.uint8]:
        from ctta.benchmark.report.plots import blend_classes, choose_palette  # imports matplotlib

        num_classes = max(len(self.classes), int(labels.max()) + 1)
        palette = choose_palette(self.classes, num_classes)
        image = _enlarge(frame)
        height, width = image.shape[:2]
        rows = np.arange(height) * labels.shape[0] // height
        columns = np.arange(width) * labels.shape[1] // width
        return blend_classes(image, labels[rows[:, None], columns].astype(np.uint16), palette)

    def _name(self, label: int) -> str:
        return self.classes[label] if self.classes else f"class {label}"


def _part_name(step: int) -> str:
    return f"{step:012}.mp4"


def _color(is_changed: bool) -> tuple[int, int, int]:
    return CHANGED_COLOR if is_changed else TEXT_COLOR


def _enlarge(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a small frame enlarged by a whole factor, so that its pixels stay what they are."""
    factor = -(-MIN_WIDTH // frame.shape[1])
    return frame if factor == 1 else frame.repeat(factor, axis=0).repeat(factor, axis=1)


def draw_lines(width: int, lines: Sequence[tuple[str, str, tuple[int, int, int]]]) -> NDArray[np.uint8]:
    """Return a strip with lines of text: a word, and what it says in a color."""
    from PIL import ImageDraw

    strip = import_pillow().new("RGB", (width, LINE_HEIGHT * len(lines)), BACKGROUND)
    draw, font = ImageDraw.Draw(strip), _load_font()
    left = MARGIN + max(draw.textlength(word, font) for word, _, _ in lines) + 2 * MARGIN
    for number, (word, text, color) in enumerate(lines):
        center = (number + 0.5) * LINE_HEIGHT
        draw.text((MARGIN, center), word, TEXT_COLOR, font, anchor="lm")
        draw.text((left, center), text, color, font, anchor="lm")
    return np.asarray(strip)


@cache
def _load_font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(FONT_SIZE)


KEY, FRAME, SECONDS, TIME = "video", "frame", "seconds", "time"


@takes_options(VideoOptions)
def adapt_video(
    net: nn.Module, clip: str | os.PathLike[str], out: str | os.PathLike[str], options: VideoOptions
) -> InferenceSummary:
    """Predict the frames of a video while adapting, and write a CSV file; needs the extra ``video``.

    With ``state`` a recording resumes after an interruption with the remaining frames, and the table ends up identical
    to that of an uninterrupted call. A camera resumes with its current frames; it is connected to again whenever it
    drops. Several videos can share a state and a table, one call after the other.

    Args:
        net: Source network; takes images in [0, 1] and returns logits (N, classes), or (N, classes, H, W) per pixel.
        clip: File, numbered images, device or address, as for :func:`ctta.data.streams.video`.
        out: CSV file to write, with the columns video, batch, frame, seconds (time for a camera), class and confidence.
            For a network that answers per pixel, the class of most pixels and the mean confidence. With ``compare``,
            also the source's answers, and ``changed``: whether they differ, or the fraction of the pixels that do.
        options: The fields of :class:`VideoOptions` as keywords.

    Returns:
        What this call did; ``num_vanished`` counts frames of a camera that came too fast.

    Raises:
        ConfigError: If an argument is not valid, or contradicts the saved state or an existing ``out``.
        DataError: If the video cannot be read.
        ImportError: If PyAV is not installed.
        OSError: If a file cannot be written.
    """
    import_av()
    check_arguments(Path(out), options)
    if world_size() > 1:
        raise ConfigError(f"a video is processed by one process, got {world_size()}: run without torchrun")
    clip_path = None if options.annotate is None else Path(options.annotate)
    compare = options.compare or clip_path is not None
    name = describe_address(clip)
    stream = video(
        clip,
        every=options.every,
        interval=options.interval,
        seconds=options.seconds,
        size=options.size,
        batch_size=options.batch_size,
    )
    stream.on_wait, stream.on_change = options.on_wait, options.on_change
    times = TIME if stream.is_live else SECONDS
    answers = answer_columns(with_names=bool(options.classes), compare=compare)
    columns = [FRAME, times, *answers, *([CHANGED] if compare else [])]
    file = PredictionFile(Path(out), columns, escape_formulas=options.escape_formulas, key=KEY)
    num_expected = None if stream.is_live else estimate_num_frames(clip, stream.sampling)

    def read_first_batch() -> Tensor | None:
        if stream.is_live:
            return None
        batch = next(iter(stream), None)
        stream.position = 0
        return None if batch is None else batch.x

    opened = open_run(
        net, file, options, images=[name], compare=compare, read_first_batch=read_first_batch, allow_pixels=True
    )
    with opened as run, ExitStack() as stack:
        before = file.read_rows(name)
        if before:
            stream.go_on_after(int(before[-1][FRAME]), _parse_time(before[-1][times]))
        if clip_path is not None:
            annotated = AnnotatedVideo(
                clip_path,
                clip_rate(clip, stream.sampling),
                options.classes,
                step=run.model.num_steps,
                keep_unsaved=options.state is None,
            )
            run.writer = stack.enter_context(closing(annotated))

        def on_batch(num_done: int) -> None:
            if options.on_progress:
                total = None if num_expected is None else max(num_expected, len(before) + num_done)
                options.on_progress(len(before) + num_done, total)

        device = find_weight(run.model.source).device
        run.process(_list_batches(stream, name, device, with_frames=run.writer is not None), on_batch)
        run.num_vanished = stream.num_dropped
        return run.summarize(num_before=len(before), order="time")


def _list_batches(
    stream: VideoStream, name: str, device: torch.device, *, with_frames: bool
) -> Iterator[InferenceBatch]:
    # A batch of a camera that is read ahead would be old by the time that it is answered.
    for batch in stream if stream.is_live else feed(stream, device):
        yield InferenceBatch(
            batch.x,
            [name] * len(batch.x),
            (list(map(str, batch.index.tolist())), format_times(batch, is_live=stream.is_live)),
            num_read=len(batch.x),
            frames=batch.frames if with_frames else (),
        )


def format_times(batch: VideoBatch, *, is_live: bool) -> list[str]:
    """Return seconds since the start of a recording, or the time of day in UTC of a camera's frames."""
    if not is_live:
        return [f"{seconds:.6f}" for seconds in batch.seconds]
    times = [datetime.fromtimestamp(seconds, UTC) for seconds in batch.seconds]
    return [time.isoformat(timespec="milliseconds").replace("+00:00", "Z") for time in times]


def _parse_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if "T" in text else float(text)
