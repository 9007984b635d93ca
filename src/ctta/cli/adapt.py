"""``ctta adapt``: adapt a network to a folder of images, or to a video."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ctta import models
from ctta.adapt import InferenceSummary, NormalizedBatches, adapt_folder, adapt_video, adapt_video_boxes
from ctta.adapt.options import VIDEO, FolderOptions, VideoOptions
from ctta.checkpoint.files import saved_method
from ctta.cli.console import print_notice, print_text, resumable_progress
from ctta.cli.options import AdaptationOptions, JsonOption, command, list_given, parse_every
from ctta.core.options import Option, refuse_options
from ctta.core.registry import DEFAULT_METHOD, parse_settings, resolve_method
from ctta.core.validation import check_choice
from ctta.detection import DEFAULT_DETECTION_METHOD, DETECTION_METHODS, load_detector
from ctta.detection.loading import DETECTOR_LOADERS
from ctta.errors import ConfigError
from ctta.evaluation.display import join_names

ORDER_LINES = {
    "shuffle": "Order: shuffled, always the same for the same names; --order name takes the images by path.",
    "name": "Order: by path.",
    "time": "Order: by time of modification.",
}


def format_summary(
    summary: InferenceSummary,
    predictions: Path,
    state: Path | None,
    *,
    asked_for_guard: bool | None,
    noun: str = "image",
    clip: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Return the lines that the command prints."""
    num_images = summary.num_images
    skipped = []
    if summary.num_vanished:
        cause = "they were deleted before they were read" if noun == "image" else "they came too fast"
        skipped.append(f"{summary.num_vanished} {noun}s were skipped because {cause}.")
    if summary.num_unreadable:
        skipped.append(
            f"{_count(summary.num_unreadable, 'image')} could not be read; the column 'error' of {predictions} says "
            "why. Replace or remove such images; the next run tries them again."
        )
    if num_images == 0:
        if not summary.num_before:
            return [f"No {noun} could be read, so nothing was predicted.", *skipped]
        return [f"No new {noun}s: all {summary.num_before} are in {predictions}.", *skipped]
    num_rows = summary.num_before + num_images + summary.num_unreadable
    lines = [f"{predictions} has {num_rows} rows, {num_images} of them new.", *skipped]
    if summary.num_dropped:
        lines.append(
            f"{summary.num_dropped} {noun}s were processed again, because the state had been saved before them; "
            f"the previous table is {predictions}.before."
        )
    speed = num_images / summary.seconds
    lines.append(f"{summary.method}: mean confidence {summary.confidence:.3f}, {speed:.1f} {noun}s/s.")
    lines += _describe_normalization(summary.normalization)
    if summary.num_changed is not None:
        percentage = 100 * summary.num_changed / num_images
        verb = "differs" if summary.num_changed == 1 else "differ"
        changed = f"{_count(summary.num_changed, 'prediction')} ({percentage:.1f} %)"
        lines.append(f"{changed} {verb} from those without adaptation.")
    elif summary.changed is not None:
        lines.append(f"{100 * summary.changed:.1f} % of the pixels differ from those without adaptation.")
    if summary.maps is not None:
        lines.append(f"{summary.maps} has a label map per image: a PNG whose pixels are the classes, with a palette.")
    if summary.shares:
        shares = [f"{name} {100 * share:.1f} %" for name, share in summary.shares.items() if share >= 0.0005]
        lines.append(f"Shares of the pixels: {join_names(shares, 10)}.")
    if noun == "image":
        lines.append(ORDER_LINES[summary.order])
    if clip is not None:
        lines.append(f"{clip} shows the answers on the frames.")
    if summary.events is None:
        reason = "" if asked_for_guard is False else ", because the state was made without one, or processes share it"
        lines.append(f"Guard: off{reason}.")
    else:
        events = ", ".join(f"{kind} {count}" for kind, count in summary.events.items() if kind != "load")
        lines.append(f"Guard: {events}; see {audit_path(predictions)}." if events else "Guard: no events.")
        if summary.num_by_source:
            lines.append(
                f"Guard: {summary.num_by_source} {noun}s ({100 * summary.num_by_source / num_images:.1f} %) were "
                "answered by the network without adaptation."
            )
    if summary.estimated_gain is not None:
        low, high = 100 * (summary.estimated_gain_low or 0.0), 100 * (summary.estimated_gain_high or 0.0)
        lines.append(
            f"Adapting: {100 * summary.estimated_gain:+.1f} points of accuracy ({low:+.1f} to {high:+.1f}) over the "
            f"network without adaptation, estimated without labels from {summary.estimated_images} new {noun}s."
        )
    if summary.num_skipped:
        lines.append(f"{summary.num_skipped} updates were skipped because they were not finite: try a lower lr.")
    return [*lines, describe_state(state)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _describe_normalization(found: Sequence[NormalizedBatches]) -> list[str]:
    """Return sentences on how batches of each size were normalized."""
    lines = []
    for batches in found:
        is_only = sum(other.batch_size == batches.batch_size for other in found) == 1
        count = "Batches" if is_only else f"{batches.num_batches} batch{'es' * (batches.num_batches > 1)}"
        images = _count(batches.batch_size, "image")
        share = 100 * batches.batch_stats
        kind = "batch" if share == 100 else f"{share:.0f} % batch and {100 - share:.0f} % source"
        lines.append(f"{count} of {images}: normalized with {kind} statistics.")
    return lines


def audit_path(predictions: Path) -> Path:
    """Return the file for the events of the guard, next to the table."""
    return predictions.parent / f"{predictions.stem}.audit.jsonl"


def describe_state(state: Path | None) -> str:
    """Return a sentence on where the adapted model is."""
    if state is None:
        return "The adapted model was not saved; use --state FILE to be able to resume."
    return f"The adapted model is saved in {state}; run the same command again to resume or to process new images."


@command
def adapt(
    *,
    predictions: Annotated[Path, Option("Write the table of predictions to this file.", "FILE.csv", "--out")],
    images: Annotated[
        Path | None, Option("Read the images in this folder and below. Default: the frames of --video.", "DIR")
    ] = None,
    video: Annotated[
        str | None,
        Option(
            "Read the frames of a file (clip.mp4), of numbered images (frames-%05d.png), or of a camera "
            "(rtsp://..., /dev/video0), which is connected to again when it drops. Default: --images.",
            "VIDEO",
            panel=VIDEO,
        ),
    ] = None,
    every: Annotated[
        str | None,
        Option("Take every N-th frame, or one per interval, such as 0.5s. Default: every frame.", "N|Ns", panel=VIDEO),
    ] = None,
    task: Annotated[
        Literal["classification", "detection"],
        Option("Let --model be a classifier or label pixels, or let it be an object detector, for --video."),
    ] = "classification",
    adaptation: AdaptationOptions,
    folder: FolderOptions,
    frames: VideoOptions,
    as_json: JsonOption = False,
) -> None:
    """Adapt to your own unlabeled images or video and write a prediction for each image.

    The table has one row per image: path, batch number, class, confidence and,
    for an image that cannot be read, the error. For a network that labels
    pixels it has the share of each class, and label maps are written beside it. Images in a folder per class
    are shuffled; see --order. Frames of a video have their number and time.
    With --state the command can be stopped or killed at any time: run it
    again to resume, and the table ends up the same as without interruption.
    Run it later to process images that were added since. The state file can
    also be opened with ctta.load. With --task detection the table has a row
    for each box, and --annotate shows the boxes without and with adaptation.
    """
    _check_options(images, video, folder, frames, every)
    if task == "detection":
        adapt_detector(predictions, video, every, adaptation, frames, as_json=as_json)
        return
    chosen = adaptation.choose()
    method, state = chosen.method, None if folder.state is None else Path(folder.state)
    if chosen.texts and method is None:
        method = saved_method(state) if state and state.exists() else DEFAULT_METHOD  # settings belong to a method
    changes: dict[str, Any] = {
        "method": method,
        "settings": resolve_method(method).parse(chosen.texts) if method else {},
        "size": chosen.size,
        "classes": folder.classes or _default_class_names(chosen.model, predictions),
        "audit": audit_path(predictions),
    } | ({} if chosen.batch_size is None else {"batch_size": chosen.batch_size})
    with resumable_progress("adapting", describe_state(state)) as (on_progress, raise_if_interrupted):
        changes["on_progress"] = on_progress
        if video is None:
            assert images is not None
            summary = adapt_folder(chosen.net, images, predictions, **vars(folder) | changes)
        else:
            changes |= parse_every(every or "1") | {"on_wait": raise_if_interrupted, "on_change": print_notice}
            summary = adapt_video(chosen.net, video, predictions, **vars(frames) | changes)
    if as_json:
        typer.echo(json.dumps(asdict(summary) | {"out": str(predictions), "state": state and str(state)}))
    else:
        noun = "image" if video is None else "frame"
        for line in format_summary(
            summary, predictions, state, asked_for_guard=folder.guard, noun=noun, clip=frames.annotate
        ):
            print_text(line)
    if summary.notice:
        print_notice(f"WARNING: {summary.notice}")
    if summary.warning:
        print_notice(f"WARNING: {summary.warning}")


def adapt_detector(
    out: Path,
    clip: str | None,
    every: str | None,
    adaptation: AdaptationOptions,
    frames: VideoOptions,
    *,
    as_json: bool,
) -> None:
    """Let a detector adapt to a video, and print what it did."""
    if clip is None:
        raise ConfigError("--task detection needs --video VIDEO: folders of images are not read yet")
    refuse_options(adaptation, ("config", "mean", "std"), "ctta adapt --task detection", "leave it out")
    if adaptation.model is None:
        raise ConfigError(
            f"give --model SPEC, such as yolov5:yolov5s.pt; expected one of {', '.join(DETECTOR_LOADERS)}"
        )
    method = adaptation.method or DEFAULT_DETECTION_METHOD
    check_choice("--method", method, tuple(DETECTION_METHODS))
    changes: dict[str, Any] = {
        "method": method,
        "settings": parse_settings(DETECTION_METHODS[method], adaptation.texts),
        "size": adaptation.size,
        "batch_size": adaptation.batch_size or 1,
    }
    detector = models.to_device(load_detector(adaptation.model), adaptation.device)
    with resumable_progress("adapting", "The adapted detector was not saved.") as (on_progress, raise_if_interrupted):
        changes |= parse_every(every or "1") | {"on_progress": on_progress}
        changes |= {"on_wait": raise_if_interrupted, "on_change": print_notice}
        summary = adapt_video_boxes(detector, clip, out, **vars(frames) | changes)
    if as_json:
        typer.echo(json.dumps(asdict(summary) | {"out": str(out)}))
        return
    count = "" if summary.num_source_boxes is None else f" The source found {summary.num_source_boxes}."
    print_text(f"{out} has {summary.num_boxes} boxes in {_count(summary.num_images, 'frame')}.{count}")
    print_text(f"{summary.method}: {summary.num_images / summary.seconds:.1f} frames/s.")
    if frames.annotate is not None:
        print_text(f"{frames.annotate} shows the boxes of the source at the left, and the adapted ones at the right.")


def _check_options(
    images: Path | None, video: str | None, folder: FolderOptions, frames: VideoOptions, every: str | None
) -> None:
    """Raise unless there are either images or a video, with the options of one of them."""
    if images is not None and video is not None:
        raise ConfigError(f"give --images DIR or --video VIDEO, not both: got {images} and {video}")
    if images is None and video is None:
        raise ConfigError("give --images DIR for a folder of images, or --video VIDEO for a video or a camera")
    if video is None and (given := [*(["--every"] if every else []), *list_given(frames, "seconds", "annotate")]):
        raise ConfigError(f"{given[0]} needs --video VIDEO: images have neither times nor frames")
    if images is None and (given := list_given(folder, "order", "strict")):
        raise ConfigError(f"{given[0]} needs --images DIR: the frames of a video come by time")


def _default_class_names(model: str, predictions: Path) -> Sequence[str] | None:
    """Return the class names of a network of the library, unless an existing table has no column for them."""
    names = models.class_names(model)
    if names is None or not predictions.is_file():
        return names
    with predictions.open(encoding="utf-8", errors="surrogateescape") as file:
        return names if "name" in file.readline().strip().split(",") else None
