"""``ctta diff``: why the tables of two runs disagree."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.console import print_text
from ctta.cli.options import JsonOption


def diff(
    first: Annotated[
        Path,
        typer.Argument(
            help="Read this folder, written by 'ctta bench', ctta.evaluate or ctta.compare.", metavar="RUN_A"
        ),
    ],
    second: Annotated[Path, typer.Argument(help="Compare it with this one.", metavar="RUN_B")],
    as_json: JsonOption = False,
) -> None:
    """Say why the tables of two runs disagree, first what explains most.

    Compared are weights, normalization, range of the input, images, order,
    classes per batch, batch size, trained tensors, settings, seeds and
    versions. If Source, which does not adapt, differs between the runs, then
    what changes every row comes first.
    """
    from ctta.benchmark.report import diff_runs

    differences = diff_runs(first, second)
    if as_json:
        typer.echo(json.dumps(differences.to_json()))
    else:
        print_text(repr(differences))
