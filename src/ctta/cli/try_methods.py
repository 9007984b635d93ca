"""``ctta try``: four methods on your own images, in a minute."""

import json
from typing import Annotated

import typer

from ctta.cli.advise import ClassOrder, CorruptionsOption, OrderOption, SeverityOption, StepSizeOption
from ctta.cli.console import exit_on_interrupt, print_notice, print_text, progress_bar
from ctta.cli.options import (
    ArraySizeOption,
    CleanImagesOption,
    DeviceOption,
    JsonOption,
    LabelsOption,
    MeanOption,
    ModelOption,
    StdOption,
    load_network,
)
from ctta.core.options import parse_names

#: What is tried by default.
METHODS = "bn_stats,tent,cotta_fast,vane"


def try_methods(
    model: ModelOption,
    images: CleanImagesOption,
    corruptions: CorruptionsOption = None,
    severity: SeverityOption = 3.0,
    methods: Annotated[
        str,
        typer.Option(
            help="Try these methods beside Source, or file:PATH.py:Class (see: ctta methods).", metavar="NAMES"
        ),
    ] = METHODS,
    labels: LabelsOption = None,
    batch_size: StepSizeOption = 32,
    order: OrderOption = ClassOrder.SHUFFLED,
    limit: Annotated[int, typer.Option(min=16, help="Use at most N randomly chosen images.", metavar="N")] = 256,
    size: ArraySizeOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    device: DeviceOption = "cpu",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed the choice of images, the corruptions and the order.", metavar="N")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Try a few methods on your own images under corruptions, and print the line to paste.

    The short form of 'ctta advise': no search, and nothing is written.
    """
    from ctta.advise import try_methods as run_trial
    from ctta.advise.pictures import DEFAULT_CORRUPTIONS

    net = load_network(model, device, mean, std)
    with exit_on_interrupt("Nothing was written; a lower --limit is faster."), progress_bar("trying") as update:
        trial = run_trial(
            net,
            images,
            methods=parse_names(methods),
            corruptions=parse_names(corruptions) if corruptions else DEFAULT_CORRUPTIONS,
            severity=severity,
            batch_size=batch_size,
            order=order.value,
            limit=limit,
            size=size,
            use_labels=labels,
            seed=seed,
            on_progress=update,
        )
    if as_json:
        found = {"methods": trial.comparison.to_records(), "best": trial.best, "python": trial.python}
        typer.echo(json.dumps(found | {"warning": trial.warning}))
    else:
        print_text(repr(trial))
    if trial.warning:
        print_notice(f"WARNING: {trial.warning}.")
