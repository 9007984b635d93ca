"""``ctta methods`` and ``ctta recipes``: list what is available."""

import inspect
import json

from rich.table import Table

from ctta.base import AdaptiveModel
from ctta.benchmark.recipes import RECIPES
from ctta.cli.console import print_text, stdout
from ctta.cli.options import JsonOption
from ctta.hyperparameters import format_value
from ctta.methods import METHODS


def methods(as_json: JsonOption = False) -> None:
    """List the adaptation methods and the defaults of their hyperparameters."""
    defaults = {name: _format_defaults(method) for name, method in METHODS.items()}
    if as_json:
        rows = [
            {"name": name, "does": _first_line(METHODS[name]), "settings": values} for name, values in defaults.items()
        ]
        stdout.print_json(json.dumps(rows))
        return
    table = Table("method", "description", "hyperparameters", box=None, padding=(0, 2, 1, 0))
    for name, values in defaults.items():
        table.add_row(name, _first_line(METHODS[name]), ", ".join(f"{key}={value}" for key, value in values.items()))
    stdout.print(table)


def recipes(as_json: JsonOption = False) -> None:
    """List the benchmarks that 'ctta bench' can run."""
    rows = [{"name": name, "does": _first_line(recipe)} for name, recipe in RECIPES.items()]
    if as_json:
        stdout.print_json(json.dumps(rows))
        return
    table = Table("recipe", "description", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(row["name"], row["does"])
    stdout.print(table)
    print_text("\nRun one with: ctta bench RECIPE")


def _format_defaults(method: type[AdaptiveModel]) -> dict[str, str]:
    """Return the defaults of a method's hyperparameters as one would type them."""
    parameters = inspect.signature(method).parameters
    return {name: format_value(parameters[name].default) for name in parameters if name != "net"}


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").split("\n")[0]
