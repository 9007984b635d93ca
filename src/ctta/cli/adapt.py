"""``ctta adapt``: adapt to a folder of one's own pictures."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.console import err, out
from ctta.cli.network import load_network
from ctta.cli.progress import progress_of_unknown_total
from ctta.cli.stopping import stopping_between_steps
from ctta.hyperparameters import parse_hyperparameters
from ctta.inference import Adapted, adapt_to_folder
from ctta.methods import METHODS
from ctta.validation import check_choice


def adapt(
    model: Annotated[
        str, typer.Option(help="timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function.", metavar="SPEC")
    ],
    images: Annotated[Path, typer.Option(help="The folder of pictures; those below it count too.", metavar="DIR")],
    predictions: Annotated[Path, typer.Option("--out", help="The table to write.", metavar="FILE.csv")],
    state: Annotated[
        Path | None,
        typer.Option(help="Keep the adapted state here, and go on from it if it is there.", metavar="FILE.safetensors"),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(METHODS)}; cotta, unless the state is of another.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting such as restore=0.005, lr=1e-4 or views=8; repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Pictures per step; BatchNorm's statistics come from them, so not too few.")
    ] = 32,
    size: Annotated[
        tuple[int, int] | None, typer.Option(help="Resize the pictures to this.", metavar="HEIGHT WIDTH")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="A text file with the name of one class per line.", metavar="FILE")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also write what the network says without adapting.")
    ] = False,
    guard: Annotated[
        bool,
        typer.Option(
            "--guard", help="Watch over the method, undo a collapse, and write events to FILE.audit.jsonl beside --out."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="Such as cuda:0.")] = "cpu",
    seed: Annotated[int | None, typer.Option(help="Of a method that draws random numbers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line for machines instead of the summary.")] = False,
) -> None:
    """Adapt to your own unlabelled pictures, and write what each is taken for.

    The table has a row per picture: its path, the number of the batch, the
    class and the confidence. With --state the work can be stopped or killed
    at any moment: the same command goes on, and the table ends up as if
    nothing had happened. Run again later, it does the pictures that have come
    since. The state is a file that ctta.load reads too.
    """
    texts = [*(settings or ()), *([f"seed={seed}"] if seed is not None else [])]
    if texts and method is None:
        method = "cotta"  # settings are read as those of a method, so a state must be of it too
    if method is not None:
        check_choice("method", method, tuple(METHODS))
    given = parse_hyperparameters(METHODS[method], texts) if method else {}
    names = None if classes is None else classes.read_text(encoding="utf-8").splitlines()
    net = load_network(model, device)
    try:
        with progress_of_unknown_total("adapting") as tell, stopping_between_steps() as stop_if_asked:

            def after_batch(done: int, total: int) -> None:
                tell(done, total)
                stop_if_asked()

            done = adapt_to_folder(
                net,
                images,
                predictions,
                method=method,
                settings=given,
                state=state,
                size=size,
                batch_size=batch_size,
                classes=names,
                compare=compare,
                guard=guard,
                audit=_audit_of(predictions),
                on_images=after_batch,
            )
    except KeyboardInterrupt:
        err.print(f"\nStopped. {_how_to_go_on(predictions, state)}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(asdict(done) | {"out": str(predictions), "state": state and str(state)}))
    else:
        for line in _summary(done, predictions, state):
            out.print(line, markup=False, soft_wrap=True)


def _summary(done: Adapted, predictions: Path, state: Path | None) -> list[str]:
    if done.num_images == 0:
        return [f"Nothing new: all {done.num_before} pictures are in {predictions}."]
    lines = [f"{predictions} has {done.num_before + done.num_images} rows, {done.num_images} of them new."]
    if done.num_dropped:
        lines.append(
            f"{done.num_dropped} pictures were done again, as the state was last saved before them; "
            f"the table as it was is {predictions}.before."
        )
    speed = f"{done.num_images / done.seconds:.1f} images/s"
    lines.append(f"{done.method}: mean confidence {done.confidence:.3f}, {speed}.")
    if done.num_changed is not None:
        share = 100 * done.num_changed / done.num_images
        lines.append(f"{done.num_changed} predictions ({share:.1f} %) differ from the network's without adapting.")
    if done.events is not None:
        told = ", ".join(f"{kind} {number}" for kind, number in done.events.items() if kind != "load")
        lines.append(f"Guard: {told}; see {_audit_of(predictions)}." if told else "Guard: all was well.")
    if done.num_skipped:
        lines.append(f"{done.num_skipped} updates were left out because they were not finite: try a lower lr.")
    return [*lines, _how_to_go_on(predictions, state)]


def _audit_of(predictions: Path) -> Path:
    return predictions.with_suffix(".audit.jsonl")


def _how_to_go_on(predictions: Path, state: Path | None) -> str:
    if state is None:
        return "Nothing to go on from was kept; --state FILE keeps it."
    return f"The state is {state}; the same command goes on with the pictures that are not in the table."
