"""``ctta doctor``: say what is installed, and what is missing."""

import json

import typer

from ctta.cli.console import print_text, stdout
from ctta.cli.installation import inspect_installation
from ctta.cli.options import JsonOption


def doctor(as_json: JsonOption = False) -> None:
    """Check the installation: versions, devices, extras, what is missing and how to get it.

    A method takes a step on every device that torch finds. The exit code is 1 if
    the library itself does not work. As 'python -m ctta doctor' it needs no extra.
    """
    found = inspect_installation()
    if as_json:
        stdout.print_json(json.dumps(found.as_dict()))
    else:
        print_text(found.describe())
    if found.problems:
        raise typer.Exit(1)
