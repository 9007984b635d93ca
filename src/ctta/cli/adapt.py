"""``ctta adapt``: adapt a network to a folder of images."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ctta import models
from ctta.cli.console import exit_on_interrupt, interrupt_between_steps, print_text, progress_bar
from ctta.cli.options import (
    ClassesOption,
    DeviceOption,
    JsonOption,
    MeanOption,
    ModelOption,
    OptionalMethodOption,
    SeedOption,
    SettingsOption,
    SizeOption,
    StdOption,
    load_network,
    read_class_names,
    with_seed,
)
from ctta.inference import InferenceSummary, adapt_folder
from ctta.registry import resolve_method


def adapt(
    model: ModelOption,
    images: Annotated[Path, typer.Option(help="Read the images in this folder and below.", metavar="DIR")],
    predictions: Annotated[
        Path, typer.Option("--out", help="Write the table of predictions to this file.", metavar="FILE.csv")
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            help="Save the adapted model to this file, and resume from it if it exists. Default: not saved.",
            metavar="FILE.safetensors",
        ),
    ] = None,
    method: OptionalMethodOption = None,
    settings: SettingsOption = None,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Adapt to N images at a time; not too few, as BatchNorm statistics are computed on each batch.",
            metavar="N",
        ),
    ] = 32,
    size: SizeOption = None,
    classes: ClassesOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also write the predictions of the network without adaptation.")
    ] = False,
    guard: Annotated[
        bool,
        typer.Option(
            "--guard", help="Detect and undo a collapse of the method; log events to FILE.audit.jsonl next to --out."
        ),
    ] = False,
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
    """Adapt to your own unlabeled images and write a prediction for each.

    The table has one row per image: path, batch number, class and confidence.
    With --state the command can be stopped or killed at any time: run it
    again to resume, and the table ends up the same as without interruption.
    Run it later to process images that were added since. The state file can
    also be opened with ctta.load.
    """
    texts = with_seed(settings, seed)
    if texts and method is None:
        method = "cotta"  # settings belong to a method, and a saved state must be of the same one
    hyperparameters = resolve_method(method).parse(texts) if method else {}
    class_names = read_class_names(classes) or _default_class_names(model, predictions)
    net = load_network(model, device, mean, std)
    with (
        exit_on_interrupt(_describe_state(state)),
        progress_bar("adapting") as update,
        interrupt_between_steps() as raise_if_interrupted,
    ):

        def on_progress(num_done: int, num_images: int) -> None:
            update(num_done, num_images)
            raise_if_interrupted()

        summary = adapt_folder(
            net,
            images,
            predictions,
            method=method,
            settings=hyperparameters,
            state=state,
            size=size,
            batch_size=batch_size,
            classes=class_names,
            compare=compare,
            guard=guard,
            audit=_audit_path(predictions),
            escape_formulas=escape_formulas,
            on_progress=on_progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(summary) | {"out": str(predictions), "state": state and str(state)}))
    else:
        for line in _format_summary(summary, predictions, state):
            print_text(line)


def _format_summary(summary: InferenceSummary, predictions: Path, state: Path | None) -> list[str]:
    num_images = summary.num_images
    vanished = [f"{summary.num_vanished} images were skipped because they were deleted before they were read."] * bool(
        summary.num_vanished
    )
    if num_images == 0:
        return [f"No new images: all {summary.num_before} are in {predictions}.", *vanished]
    lines = [f"{predictions} has {summary.num_before + num_images} rows, {num_images} of them new.", *vanished]
    if summary.num_dropped:
        lines.append(
            f"{summary.num_dropped} images were processed again, because the state had been saved before them; "
            f"the previous table is {predictions}.before."
        )
    speed = num_images / summary.seconds
    lines.append(f"{summary.method}: mean confidence {summary.confidence:.3f}, {speed:.1f} images/s.")
    if summary.num_changed is not None:
        percentage = 100 * summary.num_changed / num_images
        lines.append(f"{summary.num_changed} predictions ({percentage:.1f} %) differ from those without adaptation.")
    if summary.events is not None:
        events = ", ".join(f"{kind} {count}" for kind, count in summary.events.items() if kind != "load")
        lines.append(f"Guard: {events}; see {_audit_path(predictions)}." if events else "Guard: no events.")
    if summary.num_skipped:
        lines.append(f"{summary.num_skipped} updates were skipped because they were not finite: try a lower lr.")
    return [*lines, _describe_state(state)]


def _default_class_names(model: str, predictions: Path) -> Sequence[str] | None:
    """Return the class names of a network of the library, unless an existing table has no column for them."""
    names = models.class_names(model)
    if names is None or not predictions.is_file():
        return names
    with predictions.open(encoding="utf-8", errors="surrogateescape") as file:
        return names if "name" in file.readline().strip().split(",") else None


def _audit_path(predictions: Path) -> Path:
    return predictions.with_suffix(".audit.jsonl")


def _describe_state(state: Path | None) -> str:
    if state is None:
        return "The adapted model was not saved; use --state FILE to be able to resume."
    return f"The adapted model is saved in {state}; run the same command again to resume or to process new images."
