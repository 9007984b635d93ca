"""Adapt a network to a video and write a prediction for each frame; a recording is resumable at any frame."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from torch import nn

from ctta.adapt.annotation import AnnotatedVideo
from ctta.adapt.options import VideoOptions
from ctta.adapt.predictions import CHANGED, PredictionFile, answer_columns
from ctta.adapt.resume import check_image_size, lock_state, open_model, open_predictions
from ctta.adapt.run import InferenceBatch, InferenceRun
from ctta.adapt.summary import InferenceSummary, summarize
from ctta.adapt.video_file import VideoFile
from ctta.core.options import takes_options
from ctta.core.registry import resolve_method
from ctta.data.datasets.video import clip_rate, describe_source, estimate_num_frames, import_av
from ctta.data.streams import VideoBatch, VideoStream, video
from ctta.distributed import world_size
from ctta.errors import ConfigError
from ctta.guard import Monitored
from ctta.methods import Source

KEY, FRAME, SECONDS, TIME = "video", "frame", "seconds", "time"


@takes_options(VideoOptions)
def adapt_video(
    net: nn.Module, source: str | os.PathLike[str], out: str | os.PathLike[str], options: VideoOptions
) -> InferenceSummary:
    """Predict the frames of a video while adapting, and write a CSV file; needs the extra ``video``.

    With ``state`` a recording resumes after an interruption with the remaining frames, and the table ends up identical
    to that of an uninterrupted call. A camera goes on with its current frames; it is connected to again whenever it
    drops. Several videos can share a state and a table, one call after the other.

    Args:
        net: Source network; takes images in [0, 1] and returns logits (N, classes), or (N, classes, H, W) per pixel.
        source: File, numbered images, device or address, as for :func:`ctta.data.streams.video`.
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
    method, state, size, classes, on_progress = (
        options.method,
        options.state,
        options.size,
        options.classes,
        options.on_progress,
    )
    if method is not None:
        resolve_method(method)  # raises before anything is read
    if world_size() > 1:
        raise ConfigError(f"a video is processed by one process, got {world_size()}: run without torchrun")
    if Path(out).is_dir():
        raise ConfigError(f"{out} is a folder; expected a file to write the table to, such as predictions.csv")
    state_path, clip_path = (None if path is None else Path(path) for path in (state, options.annotate))
    compare = options.compare or clip_path is not None
    name = describe_source(source)
    stream = video(
        source,
        every=options.every,
        interval=options.interval,
        seconds=options.seconds,
        size=size,
        batch_size=options.batch_size,
    )
    stream.on_wait, stream.on_change = options.on_wait, options.on_change
    times = TIME if stream.is_live else SECONDS
    columns = [
        FRAME,
        times,
        *answer_columns(with_names=bool(classes), compare=compare),
        *([CHANGED] if compare else []),
    ]
    file = PredictionFile(Path(out), columns, escape_formulas=options.escape_formulas, key=KEY)
    num_expected = None if stream.is_live else estimate_num_frames(source, stream.sampling)
    with ExitStack() as stack:
        stack.enter_context(lock_state(state_path))
        model, is_new = open_model(
            net, state_path, method, dict(options.settings or {}), guard=options.guard, estimator=options.estimator
        )
        run = InferenceRun(
            model, Source(net, output=model.output) if compare else None, file, state_path, classes, allow_pixels=True
        )
        if not stream.is_live and not file.path.exists():
            _check_first_batch(run, stream)  # before anything is written
        with run.advise_on_full_disk(state_path or file.path):
            check_image_size(state_path, size)
            _, num_dropped, _ = open_predictions(file, model, state_path, [name], lambda _name: True, is_new=is_new)
        if isinstance(model, Monitored):
            model.audit = None if options.audit is None else os.fspath(options.audit)
            if model.num_steps and state_path is not None:
                model.on_load(state_path)
        before = file.read_rows(name)
        if before:
            stream.go_on_after(int(before[-1][FRAME]), _parse_time(before[-1][times]))
        if clip_path is not None:
            run.writer = stack.enter_context(
                AnnotatedVideo(
                    VideoFile(clip_path, clip_rate(source, stream.sampling), step=model.num_steps),
                    classes,
                    keep_unsaved=state_path is None,
                )
            )
        num_skipped_before, started = model.num_skipped, time.perf_counter()

        def on_batch(num_done: int) -> None:
            if on_progress:
                total = None if num_expected is None else max(num_expected, len(before) + num_done)
                on_progress(len(before) + num_done, total)

        run.process(_list_batches(stream, name, with_frames=run.writer is not None), on_batch)
        elapsed = time.perf_counter() - started
    return summarize(
        run,
        num_before=len(before),
        num_unreadable=0,
        num_dropped=num_dropped,
        num_vanished=stream.num_dropped,
        num_skipped_before=num_skipped_before,
        seconds=elapsed,
        order="time",
    )


def _check_first_batch(run: InferenceRun, stream: VideoStream) -> None:
    """Raise if the network cannot process the first batch, so that a mistake leaves no files behind."""
    batch = next(iter(stream), None)
    if batch is not None:
        run.check_network(batch.x)
    stream.position = 0


def _list_batches(stream: VideoStream, name: str, *, with_frames: bool) -> Iterator[InferenceBatch]:
    for batch in stream:
        yield InferenceBatch(
            batch.x,
            [name] * len(batch.x),
            (list(map(str, batch.index.tolist())), _format_times(batch, is_live=stream.is_live)),
            num_read=len(batch.x),
            frames=batch.frames if with_frames else (),
        )


def _format_times(batch: VideoBatch, *, is_live: bool) -> list[str]:
    """Return seconds since the start of a recording, or the time of day in UTC of a camera's frames."""
    if not is_live:
        return [f"{seconds:.6f}" for seconds in batch.seconds]
    times = [datetime.fromtimestamp(seconds, UTC) for seconds in batch.seconds]
    return [time.isoformat(timespec="milliseconds").replace("+00:00", "Z") for time in times]


def _parse_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if "T" in text else float(text)
