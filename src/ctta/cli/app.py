"""The commands, in the order in which ``ctta --help`` lists them, and how help texts look.

A command is imported when it is used, torch with it.
"""

import importlib
import platform
from collections import UserDict
from collections.abc import Callable
from importlib import metadata
from itertools import groupby
from typing import Annotated, Any

import typer
from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typing_extensions import override

from ctta import __version__
from ctta.cli.console import print_text
from ctta.errors import ConfigError

#: Help texts are as wide as the terminal, but not wider than one reads with ease.
MAX_WIDTH = 100
SETTINGS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def describe_parameter(parameter: Any) -> tuple[str, str]:
    """Return how an option or argument is typed, such as ``"--batch-size N"``, and what it does, with its default."""
    text = parameter.help or ""
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        names = " / ".join(filter(None, (", ".join(sorted(parameter.opts, key=len)), *parameter.secondary_opts)))
        if not parameter.is_flag:
            names += f" {parameter.metavar}"
        if "Default: " not in text and (default := _format_default(parameter)):
            text += f" Default: {default}."
    return names, f"{text} Required." if parameter.required and parameter.param_type_name == "option" else text


def _format_default(parameter: Any) -> str:
    """Return the default as one would type it; empty if nothing is done by default."""
    value = parameter.default
    if parameter.is_flag:
        return parameter.opts[0] if value else ""
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


class Command(TyperCommand):
    """A command that lists its options by subject, and corrects mistyped ones."""

    @override
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "argument"]
        names = [describe_parameter(each)[0] for each in arguments]
        required = [each.required for each in arguments]
        return [name if needed else f"[{name}]" for name, needed in zip(names, required, strict=True)] + ["[OPTIONS]"]

    @override
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # its class is click's or a copy within typer, depending on the version of typer
            if similar := getattr(error, "possibilities", None):
                message = f"No such option: {getattr(error, 'option_name', '')}. Did you mean {similar[0]}?"
                vars(error).update(message=message, possibilities=None)
            raise


#: Commands of earlier versions, and what to type instead.
REPLACED = {
    "calibrate": "'ctta calibrate' is part of 'ctta advise' now, which tries CoTTA, with a threshold for your network, "
    "among all methods: ctta advise --model SPEC --images DIR, with --methods cotta_fast to try it alone",
    "try": "'ctta try' is part of 'ctta advise' now: ctta advise --quick --model SPEC --images DIR",
}


class CommandGroup(TyperGroup):
    """A command with subcommands, listed with the first line of their help texts in full."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in REPLACED:
            raise ConfigError(REPLACED[args[0]])
        return super().resolve_command(ctx, args)

    @override
    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summarize(ctx, name)) for name in self.list_commands(ctx)])
        _write_parameters(self, ctx, formatter)

    def summarize(self, ctx: Any, name: str) -> str:
        """Return the first line of the help text of a command."""
        return first_line_of_help(self.get_command(ctx, name))


class _LazyCommands(UserDict[str, Any]):
    """Commands by name, each a path ``"module:name"`` until it is asked for."""

    @override
    def __getitem__(self, name: str) -> Any:
        if isinstance(path := self.data[name], str):
            module, _, attribute = path.partition(":")
            self.data[name] = _build_command(name, getattr(importlib.import_module(module), attribute))
        return self.data[name]


def _build_command(name: str, found: Callable[..., Any] | Typer) -> Any:
    app = found
    if not isinstance(app, Typer):
        app = Typer(**SETTINGS)
        app.command(cls=Command)(found)
    command = get_command(app)
    command.name = name
    return command


def first_line_of_help(command: Any) -> str:
    """Return the first line of the help text of a command."""
    return str(command.help or "").strip().partition("\n")[0]


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    """Write a section for the arguments, one for the options, and one for each further subject."""

    def section_of(parameter: Any) -> str:
        if parameter.param_type_name == "argument":
            return "Arguments"
        return getattr(parameter, "rich_help_panel", None) or "Options"

    parameters = [each for each in command.get_params(ctx) if not getattr(each, "hidden", False)]
    sections = list(dict.fromkeys(["Arguments", "Options", *map(section_of, parameters)]))
    ordered = sorted(parameters, key=lambda each: sections.index(section_of(each)))
    for section, members in groupby(ordered, section_of):
        with formatter.section(section):
            formatter.write_dl([describe_parameter(each) for each in members])


#: Where each command is, and what ``ctta --help`` says about it, the first line of its docstring.
COMMANDS = {
    "demo": (
        "ctta.cli.demo:demo",
        "Compare a few methods on fifteen corruptions, with a small network that comes with the library.",
    ),
    "advise": (
        "ctta.cli.advise:advise",
        "Find out whether adaptation helps your network, and which method and settings.",
    ),
    "certify": (
        "ctta.cli.advise:certify",
        "Test whether a method harms your network: pass or fail against no adaptation, on one page.",
    ),
    "adapt": (
        "ctta.cli.adapt:adapt",
        "Adapt to your own unlabeled images or video and write a prediction for each image.",
    ),
    "serve": (
        "ctta.cli.serve:serve",
        "Serve an adaptive model over HTTP: images in, labels out, for many cameras at once.",
    ),
    "bench": (
        "ctta.cli.bench:bench",
        "Run methods over a benchmark stream and write the results as a resumable run folder.",
    ),
    "report": (
        "ctta.cli.bench:report",
        "Write the tables and plots of runs as one HTML page, Markdown, LaTeX, CSV, JSON, PNG and SVG.",
    ),
    "recipes": ("ctta.cli.catalog:recipes", "List the benchmarks that 'ctta bench' can run."),
    "protocols": (
        "ctta.cli.catalog:protocols",
        "List the protocols: the ways in which corruptions can arrive in 'ctta bench'.",
    ),
    "methods": ("ctta.cli.catalog:methods", "List the methods and presets, or describe one with its hyperparameters."),
    "corrupt": ("ctta.cli.data:corrupt", "Make a folder in the layout of CIFAR-C or ImageNet-C from clean images."),
    "source-stats": (
        "ctta.cli.data:compute_source_stats",
        "Compute statistics of source images for the methods that need them.",
    ),
    "data": ("ctta.cli.data:data", "Download public datasets and checkpoints, verified, to a cache folder."),
    "doctor": (
        "ctta.cli.catalog:doctor",
        "Check the installation: versions, devices, extras, what is missing and how to get it.",
    ),
}


class _AllCommands(CommandGroup):
    """The command ``ctta``, whose subcommands are imported when they are used, and not to list them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _LazyCommands({name: path for name, (path, _) in COMMANDS.items()})

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    @override
    def summarize(self, ctx: Any, name: str) -> str:
        return COMMANDS[name][1]


app = Typer(
    cls=_AllCommands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
    **SETTINGS,
)


def _print_version(is_given: bool) -> None:
    if is_given:
        installed = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
        print_text(f"ctta {__version__} ({installed})")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Adapt vision models to their inputs, online and without labels: continual test-time adaptation."""
