"""``ctta adapt``: adapt a network to a folder of images, or to a video."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ctta import models
from ctta.adapt import InferenceSummary, adapt_folder, adapt_video
from ctta.checkpoint.files import saved_method
from ctta.cli.adapt_summary import audit_path, describe_state, format_summary
from ctta.cli.console import exit_on_interrupt, interrupt_between_steps, print_notice, print_text, progress_bar
from ctta.cli.options import (
    ClassesOption,
    ConfigOption,
    DeviceOption,
    JsonOption,
    MeanOption,
    OptionalMethodOption,
    OptionalModelOption,
    PolicyOption,
    SeedOption,
    SettingsOption,
    SizeOption,
    StdOption,
    choose_adaptation,
    join_settings,
    parse_every,
    read_class_names,
)
from ctta.core.registry import DEFAULT_METHOD, resolve_method
from ctta.errors import ConfigError

DEFAULT_BATCH_SIZE = 32
VIDEO = "Video"  # a panel of ``ctta adapt --help``


class ImageOrder(StrEnum):
    """Order in which images are read."""

    SHUFFLE = "shuffle"
    NAME = "name"
    TIME = "time"


def adapt(
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
            metavar="SOURCE",
            rich_help_panel=VIDEO,
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            help="Take every N-th frame, or one per interval, such as 0.5s. Default: every frame.",
            metavar="N|Ns",
            rich_help_panel=VIDEO,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Read this much of the video. Default: all of it, or until Ctrl-C.",
            metavar="SECONDS",
            rich_help_panel=VIDEO,
        ),
    ] = None,
    annotate: Annotated[
        Path | None,
        typer.Option(
            help="Write a video that shows the answers of the network without and with adaptation on the frames; "
            "implies --compare. Default: none.",
            metavar="FILE.mp4",
            rich_help_panel=VIDEO,
        ),
    ] = None,
    model: OptionalModelOption = None,
    config: ConfigOption = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Save the adapted model to this file, and resume from it if it exists. Default: not saved.",
            metavar="FILE.safetensors",
        ),
    ] = None,
    method: OptionalMethodOption = None,
    settings: SettingsOption = None,
    policies: PolicyOption = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Adapt to N images at a time; the fewer, the more BatchNorm relies on the source's statistics. "
            "Default: that of --config, else 32.",
            metavar="N",
        ),
    ] = None,
    order: Annotated[
        ImageOrder | None,
        typer.Option(
            help="Take the images in this order: shuffled, by path (name), or by time of modification. "
            "Default: shuffle for a folder per class, else name.",
            metavar="|".join(ImageOrder),
        ),
    ] = None,
    size: SizeOption = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at an image that cannot be read, instead of skipping it.")
    ] = False,
    classes: ClassesOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also write the predictions of the network without adaptation.")
    ] = False,
    guard: Annotated[
        bool | None,
        typer.Option(
            "--guard/--no-guard",
            help="Detect and undo a collapse of the method, and let the network without adaptation answer batches that "
            "are sorted by class; log events to FILE.audit.jsonl next to --out. Default: --guard; a saved state goes "
            "on as it was.",
            show_default=False,
        ),
    ] = None,
    escape_formulas: Annotated[
        bool,
        typer.Option(
            "--escape-formulas",
            help="Write an apostrophe before names that a spreadsheet would run as a formula, such as =1+1.png.",
        ),
    ] = False,
    device: DeviceOption = "cpu",
    seed: SeedOption = None,
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
    run = _choose_run(images, video, order, strict, every, seconds, annotate)
    chosen = choose_adaptation(
        config,
        model=model,
        method=method,
        texts=join_settings(settings, policies, seed),
        mean=mean,
        std=std,
        size=size,
        device=device,
        batch_size=batch_size,
    )
    method = chosen.method
    if chosen.texts and method is None:
        method = saved_method(state) if state and state.exists() else DEFAULT_METHOD  # settings belong to a method
    hyperparameters = resolve_method(method).parse(chosen.texts) if method else {}
    with (
        exit_on_interrupt(describe_state(state)),
        progress_bar("adapting") as update,
        interrupt_between_steps() as raise_if_interrupted,
    ):

        def on_progress(num_done: int, num_images: int | None) -> None:
            update(num_done, num_images)
            raise_if_interrupted()

        if video is not None:
            run = partial(run, on_wait=raise_if_interrupted, on_change=print_notice)
        summary = run(
            chosen.net,
            out=predictions,
            method=method,
            settings=hyperparameters,
            state=state,
            size=chosen.size,
            batch_size=chosen.batch_size or DEFAULT_BATCH_SIZE,
            classes=read_class_names(classes) or _default_class_names(chosen.model, predictions),
            compare=compare,
            guard=guard,
            estimator=chosen.estimator,
            audit=audit_path(predictions),
            escape_formulas=escape_formulas,
            on_progress=on_progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(summary) | {"out": str(predictions), "state": state and str(state)}))
    else:
        noun = "image" if video is None else "frame"
        for line in format_summary(summary, predictions, state, asked_for_guard=guard, noun=noun, clip=annotate):
            print_text(line)
    if summary.warning:
        print_notice(f"WARNING: {summary.warning}")


def _choose_run(
    images: Path | None,
    video: str | None,
    order: ImageOrder | None,
    strict: bool,
    every: str | None,
    seconds: float | None,
    annotate: Path | None,
) -> Callable[..., InferenceSummary]:
    """Return what to do with the images or the video; raise if the options of one are given for the other."""
    if images is not None and video is not None:
        raise ConfigError(f"give --images DIR or --video SOURCE, not both: got {images} and {video}")
    if images is not None:
        if given := _list_given(every=every, seconds=seconds, annotate=annotate):
            raise ConfigError(f"{given} needs --video SOURCE: images have neither times nor frames")
        return partial(adapt_folder, images=images, order=order.value if order else None, strict=strict)
    if video is None:
        raise ConfigError("give --images DIR for a folder of images, or --video SOURCE for a video or a camera")
    if given := _list_given(order=order, strict=strict or None):
        raise ConfigError(f"{given} needs --images DIR: the frames of a video come by time")
    return partial(adapt_video, source=video, seconds=seconds, annotate=annotate, **parse_every(every or "1"))


def _list_given(**options: object) -> str:
    """Return the first option that is given, as it is typed."""
    return next((f"--{name}" for name, value in options.items() if value is not None), "")


def _default_class_names(model: str, predictions: Path) -> Sequence[str] | None:
    """Return the class names of a network of the library, unless an existing table has no column for them."""
    names = models.class_names(model)
    if names is None or not predictions.is_file():
        return names
    with predictions.open(encoding="utf-8", errors="surrogateescape") as file:
        return names if "name" in file.readline().strip().split(",") else None
