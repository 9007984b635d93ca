"""``ctta calibrate``: settings of CoTTA for one's own network."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ctta.advise.tuning import Trial, Tuning
from ctta.cli.console import err, out
from ctta.cli.network import load_network
from ctta.cli.progress import progress_of_unknown_total
from ctta.corruptions import HOLD_OUT
from ctta.datasets.clean_images import read_clean_images


def calibrate(
    model: Annotated[
        str, typer.Option(help="timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function.", metavar="SPEC")
    ],
    images: Annotated[
        Path,
        typer.Option(help="Source images: a tree <class>/<picture>, a folder, or an .npz.", metavar="DIR|FILE.npz"),
    ],
    labels: Annotated[
        bool | None,
        typer.Option(
            "--labels/--no-labels",
            help="Whether the images' labels count; by default if there are as many class folders as classes.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many of the images, drawn at random.")] = 500,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Stop trying after so many minutes.", metavar="MINUTES")
    ] = None,
    views: Annotated[int, typer.Option(min=1, help="Augmented views of CoTTA; the cost grows with them.")] = 8,
    rounds: Annotated[
        int, typer.Option(min=1, help="Go through the corruptions so often; learning needs a long stream to show.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step, as you will have them in use.")] = 50,
    size: Annotated[
        tuple[int, int] | None, typer.Option(help="Resize the pictures to this.", metavar="HEIGHT WIDTH")
    ] = None,
    device: Annotated[str, typer.Option(help="Such as cuda:0.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of images, of corruptions and of views.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One line for machines instead of the table.")] = False,
) -> None:
    """Choose CoTTA's settings for your network, on images like those it was trained on.

    The threshold follows the rule of CoTTA's authors. The learning rate and
    the restore probability are tried out on a stream of four corruptions that
    the benchmarks leave out. Without labels, the network's own answers on the
    clean images take their place. Ends with the line of Python to paste, and
    says so where adapting does not help.
    """
    clean = read_clean_images(images, size=size, limit=limit, seed=seed)
    net = load_network(model, device)
    tuning = Tuning(net, clean, use_labels=labels, batch_size=batch_size, num_views=views, num_rounds=rounds, seed=seed)
    stopped = False
    try:
        with progress_of_unknown_total("calibrating") as tell:
            tuning.run(seconds=None if budget is None else budget * 60, on_step=tell)
    except KeyboardInterrupt:
        stopped = True  # what was found until now is worth showing
    if len(tuning.trials) < 2:
        err.print("\nStopped before anything was found out; --limit makes it shorter.")
        raise typer.Exit(130)
    if as_json:
        typer.echo(json.dumps(_as_json(tuning)))
    else:
        _show(tuning)
    if stopped:
        raise typer.Exit(130)


def _as_json(tuning: Tuning) -> dict[str, Any]:
    return {
        "threshold": tuning.threshold,
        "labels": "given" if tuning.has_labels else "the network's answers on the clean images",
        "images": tuning.num_images,
        "steps": tuning.num_steps,
        "clean_error": tuning.clean_error,
        "trials": [_trial_as_json(trial) for trial in tuning.trials],
        "tried": len(tuning.trials),
        "to_try": tuning.num_trials,
        "best": tuning.best and _trial_as_json(tuning.best),
        "recommended": tuning.recommended.method,
        "python": tuning.python(tuning.recommended),
    }


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    settings = {"lr": trial.learning_rate, "restore": trial.restore} if trial.learning_rate is not None else {}
    return {"method": trial.method, **settings, "error": trial.error}


def _show(tuning: Tuning) -> None:
    against = (
        "your labels" if tuning.has_labels else "the network's own answers on the clean images, as there are no labels"
    )
    _say(f"{tuning.num_images} images under {', '.join(HOLD_OUT)} at severity 5, scored against {against}.")
    if tuning.clean_error is not None:
        _say(f"On the clean images the network errs in {100 * tuning.clean_error:.1f} %.")
    _say(f"Threshold by the authors' rule: {tuning.threshold}\n")
    table = Table("method", "lr", "restore", "error %", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for trial in tuning.trials:
        settings = ["", ""] if trial.learning_rate is None else [f"{trial.learning_rate:g}", f"{trial.restore:g}"]
        style = "bold" if trial is tuning.recommended else None
        table.add_row(trial.method, *settings, f"{100 * trial.error:.1f}", style=style)
    out.print(table)
    _say("")
    for line in _verdict(tuning):
        _say(line)
    _say("\nfrom functools import partial\nimport ctta, torch\n")
    _say(tuning.python(tuning.recommended))
    if tuning.best and tuning.recommended is not tuning.best:
        _say(f"\nIf you want CoTTA all the same:\n\n{tuning.python(tuning.best)}")


def _verdict(tuning: Tuning) -> list[str]:
    lines = []
    if (missing := tuning.num_trials - len(tuning.trials)) > 0:
        lines.append(f"{missing} of {tuning.num_trials} settings were not tried: give more time, or a lower --limit.")
    if tuning.best is None:
        return [*lines, "CoTTA was not tried at all, so nothing is known of it."]
    if tuning.recommended is tuning.best:
        lines.append("CoTTA is better than Source and BN Stats beyond chance.")
    else:
        lines.append(
            f"CoTTA is not better than {tuning.recommended.method} beyond chance: here it is not worth its cost."
        )
    if tuning.best is tuning.trials[2]:
        lines.append("No other setting of it is better than its defaults beyond chance, so they stay.")
    lines.append(f"A trial was {tuning.num_steps} steps; over more, the learning rate counts for more (--rounds).")
    return lines


def _say(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)
