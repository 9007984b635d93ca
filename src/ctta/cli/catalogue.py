"""``ctta methods`` and ``ctta recipes``: what there is."""

import inspect
import json
from typing import Annotated

import typer
from rich.table import Table

from ctta.base import AdaptiveModel
from ctta.benchmark.recipes import RECIPES
from ctta.cli.console import out
from ctta.hyperparameters import format_value
from ctta.methods import METHODS

AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


def methods(as_json: AsJson = False) -> None:
    """List the methods, what each does, and its settings."""
    settings = {name: _settings(method) for name, method in METHODS.items()}
    if as_json:
        rows = [
            {"name": name, "does": _first_sentence(METHODS[name]), "settings": defaults}
            for name, defaults in settings.items()
        ]
        out.print_json(json.dumps(rows))
        return
    table = Table("method", "what it does", "settings", box=None, padding=(0, 2, 1, 0))
    for name, defaults in settings.items():
        typed = ", ".join(f"{key}={value}" for key, value in defaults.items())
        table.add_row(name, _first_sentence(METHODS[name]), typed)
    out.print(table)


def recipes(as_json: AsJson = False) -> None:
    """List the tables that 'ctta bench' can fill."""
    rows = [{"name": name, "does": _first_sentence(recipe)} for name, recipe in RECIPES.items()]
    if as_json:
        out.print_json(json.dumps(rows))
        return
    table = Table("recipe", "what it is", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(row["name"], row["does"])
    out.print(table)
    out.print("\nRun one with: ctta bench RECIPE")


def _settings(method: type[AdaptiveModel]) -> dict[str, str]:
    """Every setting and its default, as one would type it."""
    parameters = inspect.signature(method).parameters
    return {name: format_value(parameters[name].default) for name in parameters if name != "net"}


def _first_sentence(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]
