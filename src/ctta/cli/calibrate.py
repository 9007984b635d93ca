"""``ctta calibrate``: choose CoTTA's settings for a network."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ctta.advise import Trial, Tuner
from ctta.cli.console import print_notice, print_text, progress_bar, stdout
from ctta.cli.options import (
    DeviceOption,
    JsonOption,
    MeanOption,
    ModelOption,
    StdOption,
    check_size,
    load_network,
)
from ctta.corruptions import HOLD_OUT
from ctta.datasets.clean_images import read_clean_images


def calibrate(
    model: ModelOption,
    images: Annotated[
        Path,
        typer.Option(
            help="Read source images from a folder, with or without one subfolder per class, or from an .npz file.",
            metavar="DIR|FILE.npz",
        ),
    ],
    labels: Annotated[
        bool | None,
        typer.Option(
            "--labels/--no-labels",
            help="Score against the labels of the images. Default: if there are as many subfolders as classes.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most N randomly chosen images.", metavar="N")] = 500,
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Stop the search after this many minutes. Default: no limit.", metavar="MINUTES"),
    ] = None,
    views: Annotated[
        int,
        typer.Option(min=1, help="Average N augmented views in CoTTA; the cost grows with their number.", metavar="N"),
    ] = 8,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Repeat the corruptions N times; the effect of learning shows on long streams only.",
            metavar="N",
        ),
    ] = 1,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Adapt to N images at a time; use the number of your application.", metavar="N")
    ] = 50,
    size: Annotated[
        tuple[int, int] | None,
        typer.Option(
            help="Resize image files; the arrays of an .npz file keep their size. Default: their own size.",
            metavar="HEIGHT WIDTH",
            callback=check_size,
        ),
    ] = None,
    mean: MeanOption = None,
    std: StdOption = None,
    device: DeviceOption = "cpu",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed the choice of images, the corruptions and the views.", metavar="N")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Choose CoTTA's settings for your network, on images like those it was trained on.

    The threshold follows the rule of CoTTA's reference implementation. The
    learning rate and the restore probability are searched on a stream of four
    corruptions that the benchmarks do not use. Without labels, the predictions
    of the network on the clean images are used instead. The output ends with a
    line of Python to paste, and says so if adaptation does not help.
    """
    clean = read_clean_images(images, size=size, limit=limit, seed=seed)
    net = load_network(model, device, mean, std)
    tuner = Tuner(net, clean, use_labels=labels, batch_size=batch_size, num_views=views, num_rounds=rounds, seed=seed)
    is_interrupted = False
    try:
        with progress_bar("calibrating") as update:
            tuner.run(seconds=None if budget is None else budget * 60, on_step=update)
    except KeyboardInterrupt:
        is_interrupted = True  # the finished trials are still worth printing
    if not tuner.has_baselines:
        print_notice("\nStopped before there was any result; a lower --limit is faster.")
        raise typer.Exit(130)
    if as_json:
        typer.echo(json.dumps(_as_json(tuner)))
    else:
        _print_results(tuner)
    if is_interrupted:
        raise typer.Exit(130)


def _as_json(tuner: Tuner) -> dict[str, Any]:
    return {
        "threshold": tuner.threshold,
        "labels": "given" if tuner.has_labels else "the network's answers on the clean images",
        "images": tuner.num_images,
        "steps": tuner.num_steps,
        "clean_error": tuner.clean_error,
        "trials": [_trial_as_json(trial) for trial in tuner.trials],
        "tried": len(tuner.trials),
        "to_try": tuner.num_trials,
        "best": tuner.best_candidate and _trial_as_json(tuner.best_candidate),
        "recommended": tuner.recommended.method,
        "python": tuner.format_python(tuner.recommended),
    }


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    settings = {} if trial.learning_rate is None else {"lr": trial.learning_rate, "restore": trial.restore}
    return {"method": trial.method, **settings, "error": trial.error}


def _print_results(tuner: Tuner) -> None:
    reference = "your labels" if tuner.has_labels else "the network's predictions on the clean images (no labels)"
    print_text(f"{tuner.num_images} images under {', '.join(HOLD_OUT)} at severity 5, scored against {reference}.")
    if tuner.clean_error is not None:
        print_text(f"Error of the network on the clean images: {100 * tuner.clean_error:.1f} %")
    print_text(f"Threshold by the rule of the reference implementation: {tuner.threshold}\n")
    recommended, best = tuner.recommended, tuner.best_candidate
    table = Table("method", "lr", "restore", "error %", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for trial in tuner.trials:
        settings = ["", ""] if trial.learning_rate is None else [f"{trial.learning_rate:g}", f"{trial.restore:g}"]
        style = "bold" if trial is recommended else None
        table.add_row(trial.method, *settings, f"{100 * trial.error:.1f}", style=style)
    stdout.print(table)
    print_text("")
    for line in _format_verdict(tuner):
        print_text(line)
    print_text("\nfrom functools import partial\nimport ctta, torch\n")
    print_text(tuner.format_python(recommended))
    if best and recommended is not best:
        print_text(f"\nTo use CoTTA anyway:\n\n{tuner.format_python(best)}")


def _format_verdict(tuner: Tuner) -> list[str]:
    lines = []
    if (num_missing := tuner.num_trials - len(tuner.trials)) > 0:
        lines.append(f"{num_missing} of {tuner.num_trials} trials were not run: raise --budget or lower --limit.")
    best = tuner.best_candidate
    if best is None:
        return [*lines, "No setting of CoTTA was tried, so it could not be compared."]
    if tuner.recommended is best:
        lines.append("CoTTA is significantly better than Source and BN Stats.")
    else:
        lines.append(
            f"CoTTA is not significantly better than {tuner.recommended.method}: here it is not worth its cost."
        )
    if best is tuner.default_candidate:
        lines.append("No other setting of CoTTA is significantly better than its defaults, so they are kept.")
    lines.append(f"A trial had {tuner.num_steps} steps; on longer streams (--rounds) the learning rate matters more.")
    return lines
