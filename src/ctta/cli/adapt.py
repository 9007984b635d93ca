"""``ctta adapt``: adapt a network to a folder of images, or to a video."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ctta import models
from ctta.adapt import adapt_folder, adapt_video
from ctta.adapt.options import VIDEO, FolderOptions, VideoOptions
from ctta.checkpoint.files import saved_method
from ctta.cli.adapt_summary import audit_path, describe_state, format_summary
from ctta.cli.console import exit_on_interrupt, interrupt_between_steps, print_notice, print_text, progress_bar
from ctta.cli.options import AdaptationOptions, EveryOption, JsonOption, command, list_given, parse_every
from ctta.core.registry import DEFAULT_METHOD, resolve_method
from ctta.errors import ConfigError


@command
def adapt(
    *,
    predictions: Annotated[
        Path, typer.Option("--out", help="Write the table of predictions to this file.", metavar="FILE.csv")
    ],
    images: Annotated[
        Path | None,
        typer.Option(help="Read the images in this folder and below. Default: the frames of --video.", metavar="DIR"),
    ] = None,
    video: Annotated[
        str | None,
        typer.Option(
            help="Read the frames of a file (clip.mp4), of numbered images (frames-%05d.png), or of a camera "
            "(rtsp://..., /dev/video0), which is connected to again when it drops. Default: --images.",
            metavar="VIDEO",
            rich_help_panel=VIDEO,
        ),
    ] = None,
    every: EveryOption = None,
    adaptation: AdaptationOptions,
    folder: FolderOptions,
    frames: VideoOptions,
    as_json: JsonOption = False,
) -> None:
    """Adapt to your own unlabeled images or video and write a prediction for each image.

    The table has one row per image: path, batch number, class, confidence and,
    for an image that cannot be read, the error. Images in a folder per class
    are shuffled; see --order. Frames of a video have their number and time.
    With --state the command can be stopped or killed at any time: run it
    again to resume, and the table ends up the same as without interruption.
    Run it later to process images that were added since. The state file can
    also be opened with ctta.load.
    """
    _check_options(images, video, folder, frames, every)
    chosen = adaptation.choose()
    method, state = chosen.method, None if folder.state is None else Path(folder.state)
    if chosen.texts and method is None:
        method = saved_method(state) if state and state.exists() else DEFAULT_METHOD  # settings belong to a method
    changes: dict[str, Any] = {
        "method": method,
        "settings": resolve_method(method).parse(chosen.texts) if method else {},
        "size": chosen.size,
        "classes": folder.classes or _default_class_names(chosen.model, predictions),
        "estimator": chosen.estimator,
        "audit": audit_path(predictions),
    } | ({} if chosen.batch_size is None else {"batch_size": chosen.batch_size})
    with (
        exit_on_interrupt(describe_state(state)),
        progress_bar("adapting") as update,
        interrupt_between_steps() as raise_if_interrupted,
    ):

        def on_progress(num_done: int, num_images: int | None) -> None:
            update(num_done, num_images)
            raise_if_interrupted()

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
    if summary.warning:
        print_notice(f"WARNING: {summary.warning}")


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
