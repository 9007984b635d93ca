"""``ctta adapt``: adapt a network to a folder of images."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ctta import models
from ctta.checkpoint.files import saved_method
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
    read_class_names,
)
from ctta.inference import InferenceSummary, NormalizedBatches, adapt_folder
from ctta.registry import resolve_method

DEFAULT_BATCH_SIZE = 32
ORDER_LINES = {
    "shuffle": "Order: shuffled, always the same for the same names; --order name takes the images by path.",
    "name": "Order: by path.",
    "time": "Order: by time of modification.",
}


class ImageOrder(StrEnum):
    """Order in which images are read."""

    SHUFFLE = "shuffle"
    NAME = "name"
    TIME = "time"


def adapt(
    images: Annotated[Path, typer.Option(help="Read the images in this folder and below.", metavar="DIR")],
    predictions: Annotated[
        Path, typer.Option("--out", help="Write the table of predictions to this file.", metavar="FILE.csv")
    ],
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
    """Adapt to your own unlabeled images and write a prediction for each.

    The table has one row per image: path, batch number, class, confidence and,
    for an image that cannot be read, the error. Images in a folder per class
    are shuffled; see --order.
    With --state the command can be stopped or killed at any time: run it
    again to resume, and the table ends up the same as without interruption.
    Run it later to process images that were added since. The state file can
    also be opened with ctta.load.
    """
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
        method = saved_method(state) if state and state.exists() else "cotta"  # settings belong to a method
    hyperparameters = resolve_method(method).parse(chosen.texts) if method else {}
    class_names = read_class_names(classes) or _default_class_names(chosen.model, predictions)
    with (
        exit_on_interrupt(_describe_state(state)),
        progress_bar("adapting") as update,
        interrupt_between_steps() as raise_if_interrupted,
    ):

        def on_progress(num_done: int, num_images: int) -> None:
            update(num_done, num_images)
            raise_if_interrupted()

        summary = adapt_folder(
            chosen.net,
            images,
            predictions,
            method=method,
            settings=hyperparameters,
            state=state,
            size=chosen.size,
            batch_size=chosen.batch_size or DEFAULT_BATCH_SIZE,
            order=order.value if order else None,
            strict=strict,
            classes=class_names,
            compare=compare,
            guard=guard,
            estimator=chosen.estimator,
            audit=_audit_path(predictions),
            escape_formulas=escape_formulas,
            on_progress=on_progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(summary) | {"out": str(predictions), "state": state and str(state)}))
    else:
        for line in _format_summary(summary, predictions, state, asked_for_guard=guard):
            print_text(line)
    if summary.warning:
        print_notice(f"WARNING: {summary.warning}")


def _format_summary(
    summary: InferenceSummary, predictions: Path, state: Path | None, *, asked_for_guard: bool | None
) -> list[str]:
    num_images = summary.num_images
    skipped = []
    if summary.num_vanished:
        skipped.append(f"{summary.num_vanished} images were skipped because they were deleted before they were read.")
    if summary.num_unreadable:
        skipped.append(
            f"{_count(summary.num_unreadable, 'image')} could not be read; the column 'error' of {predictions} says "
            "why. Replace or remove such images; the next run tries them again."
        )
    if num_images == 0:
        if not summary.num_before:
            return ["No image could be read, so nothing was predicted.", *skipped]
        return [f"No new images: all {summary.num_before} are in {predictions}.", *skipped]
    num_rows = summary.num_before + num_images + summary.num_unreadable
    lines = [f"{predictions} has {num_rows} rows, {num_images} of them new.", *skipped]
    if summary.num_dropped:
        lines.append(
            f"{summary.num_dropped} images were processed again, because the state had been saved before them; "
            f"the previous table is {predictions}.before."
        )
    speed = num_images / summary.seconds
    lines.append(f"{summary.method}: mean confidence {summary.confidence:.3f}, {speed:.1f} images/s.")
    lines += _describe_normalization(summary.normalization)
    if summary.num_changed is not None:
        percentage = 100 * summary.num_changed / num_images
        verb = "differs" if summary.num_changed == 1 else "differ"
        changed = f"{_count(summary.num_changed, 'prediction')} ({percentage:.1f} %)"
        lines.append(f"{changed} {verb} from those without adaptation.")
    lines.append(ORDER_LINES[summary.order])
    if summary.events is None:
        reason = "" if asked_for_guard is False else ", because the state was made without one, or processes share it"
        lines.append(f"Guard: off{reason}.")
    else:
        events = ", ".join(f"{kind} {count}" for kind, count in summary.events.items() if kind != "load")
        lines.append(f"Guard: {events}; see {_audit_path(predictions)}." if events else "Guard: no events.")
        if summary.num_by_source:
            lines.append(
                f"Guard: {summary.num_by_source} images ({100 * summary.num_by_source / num_images:.1f} %) were "
                "answered by the network without adaptation."
            )
    if summary.estimated_gain is not None:
        low, high = summary.estimated_gain_low or 0.0, summary.estimated_gain_high or 0.0
        half = 50 * (high - low)
        lines.append(
            f"Adapting: {100 * summary.estimated_gain:+.1f} ± {half:.1f} points of accuracy over the network without "
            "adaptation, estimated without labels over the last batches."
        )
    if summary.num_skipped:
        lines.append(f"{summary.num_skipped} updates were skipped because they were not finite: try a lower lr.")
    return [*lines, _describe_state(state)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _default_class_names(model: str, predictions: Path) -> Sequence[str] | None:
    """Return the class names of a network of the library, unless an existing table has no column for them."""
    names = models.class_names(model)
    if names is None or not predictions.is_file():
        return names
    with predictions.open(encoding="utf-8", errors="surrogateescape") as file:
        return names if "name" in file.readline().strip().split(",") else None


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


def _audit_path(predictions: Path) -> Path:
    return predictions.parent / f"{predictions.stem}.audit.jsonl"


def _describe_state(state: Path | None) -> str:
    if state is None:
        return "The adapted model was not saved; use --state FILE to be able to resume."
    return f"The adapted model is saved in {state}; run the same command again to resume or to process new images."
