"""Say what there is: ``ctta recipes``, ``ctta protocols``, ``ctta methods`` and ``ctta doctor``."""

import inspect
import json
from typing import Annotated, Any

import typer

from ctta.benchmark.detection import DETECTION, run_detection_benchmark
from ctta.benchmark.matrix import MATRIX, run_matrix
from ctta.benchmark.recipes import RECIPES
from ctta.cli.console import print_notice, print_rows, print_text, stdout
from ctta.cli.installation import inspect_installation
from ctta.cli.options import JsonOption, command
from ctta.core.hyperparameters import format_value
from ctta.core.options import Option
from ctta.core.registry import NamedMethod, list_methods, resolve_method
from ctta.data.streams import PROTOCOLS
from ctta.errors import ConfigError
from ctta.policies import POLICIES


@command
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Describe this method and its hyperparameters. Default: list all.", metavar="NAME"),
    ] = None,
    no_backward: Annotated[
        bool, Option("Show only methods without a backward pass, for devices and networks that cannot train.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the methods and presets, or describe one with its hyperparameters.

    The names are the same in adapt, serve, bench and ctta.adapt. Installed
    packages add methods with entry points in the group ctta.methods.
    """
    found = [resolve_method(name)] if name else _resolve_all()
    if no_backward:
        if name:
            raise ConfigError(f"--no-backward chooses from the list: leave it out, or the name {name!r}")
        found = [each for each in found if each.method.info is not None and each.info.backward_passes == 0]
    if as_json:
        stdout.print_json(json.dumps([_as_json(each) for each in found]))
    elif name:
        _print_method(found[0])
    else:
        _print_methods(found)


@command
def recipes(as_json: JsonOption = False) -> None:
    """List the benchmarks that 'ctta bench' can run."""
    rows = [
        {"name": name, "does": _first_line(recipe)}
        for name, recipe in {**RECIPES, MATRIX: run_matrix, DETECTION: run_detection_benchmark}.items()
    ]
    if as_json:
        stdout.print_json(json.dumps(rows))
        return
    print_rows(("recipe", "description"), ((row["name"], row["does"]) for row in rows))
    print_text("\nRun one with: ctta bench RECIPE")


@command
def protocols(as_json: JsonOption = False) -> None:
    """List the protocols: the ways in which corruptions can arrive in 'ctta bench'."""
    settings = {
        name: {key: format_value(value) for key, value in each.defaults.items()} for name, each in PROTOCOLS.items()
    }
    if as_json:
        rows = [
            {"name": name, "does": each.summary, "settings": settings[name], "paper": each.reference}
            for name, each in PROTOCOLS.items()
        ]
        stdout.print_json(json.dumps(rows))
        return
    texts = [
        (name, each.summary, " ".join(f"{key}={value}" for key, value in settings[name].items()), each.reference)
        for name, each in PROTOCOLS.items()
    ]
    print_rows(("protocol", "description", "settings", "paper"), texts, keep="protocol")
    print_text("\nRun one with: ctta bench RECIPE --protocol NAME,KEY=VALUE")


def _resolve_all() -> list[NamedMethod]:
    """Return every method that can be imported; report the packages whose methods cannot."""
    found = []
    for name in list_methods():
        try:
            found.append(resolve_method(name))
        except ConfigError as error:
            print_notice(f"Skipped: {error}.")
    return found


def _print_methods(found: list[NamedMethod]) -> None:
    columns = ("method", "trains", "forward", "backward", "copies", "source data", "paper")
    rows = []
    for each in found:
        info = each.info
        if each.preset:
            continue
        if each.method.info is None:
            rows.append([each.name, "not declared"])
        else:
            counts = (str(count) for count in (info.forward_passes, info.backward_passes, info.num_networks))
            rows.append([each.name, info.trains, *counts, "yes" if info.needs_source_data else "no", info.paper])
    print_rows(columns, rows, keep="method")
    print_text("\nforward, backward: passes per step. copies: of the network, in memory.")
    if presets := [each.name for each in found if each.preset]:
        print_text(f"Presets: {', '.join(presets)}")
    print_text(f"Policies, for methods that learn: {', '.join(POLICIES)}; such as --policy reset_every=1000")
    print_text("Describe a method with: ctta methods NAME. Use a class of your own as: file:PATH.py:Class")


def _print_method(found: NamedMethod) -> None:
    info = found.info
    print_text(f"{found.name}: {found.label}{f' ({info.paper})' if info.paper else ''}")
    print_text(_describe(found))
    if found.method.info is not None:
        print_text(
            f"Trains: {info.trains}. Passes per step: forward {info.forward_passes}, backward {info.backward_passes}. "
            f"Copies of the network: {info.num_networks}. Source data: {'yes' if info.needs_source_data else 'no'}."
            f"{' Networks: vision transformers with a class token.' if info.needs_vit else ''}"
        )
    print_text("")
    print_rows(("hyperparameter", "default"), _format_defaults(found).items())
    rate = " (the learning rate as --set lr=VALUE)" if "optimizer" in inspect.signature(found.method).parameters else ""
    print_text(f"\nSet one with --set NAME=VALUE{rate}, or in Python as a keyword.")


def _as_json(found: NamedMethod) -> dict[str, Any]:
    info = found.info
    facts = {
        "paper": info.paper,
        "trains": info.trains,
        "forward_passes": info.forward_passes,
        "backward_passes": info.backward_passes,
        "networks": info.num_networks,
        "needs_source_data": info.needs_source_data,
        "needs_vit": info.needs_vit,
    }
    return {
        "name": found.name,
        "title": found.label,
        "does": _describe(found),
        **(facts if found.method.info else dict.fromkeys(facts)),
        "settings": _format_defaults(found),
    }


def _describe(found: NamedMethod) -> str:
    """Return the first line of the method's own docstring, not of the class that it extends."""
    own = vars(found.method).get("__doc__")
    return _first_line(found.method) if own else "The class has no docstring."


def _format_defaults(found: NamedMethod) -> dict[str, str]:
    """Return the hyperparameters of a method or preset as one would type them."""
    parameters = inspect.signature(found.method).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "net"}
    if "lr" in defaults and defaults["lr"] is None:  # that of the optimizer, which is listed
        del defaults["lr"]
    return {name: format_value(value) for name, value in {**defaults, **found.settings}.items()}


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").split("\n")[0]


@command
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
