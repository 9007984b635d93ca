"""The commands, in the order in which ``ctta --help`` lists them."""

import platform
from typing import Annotated

import torch
import typer

from ctta import __version__
from ctta.cli.adapt import adapt
from ctta.cli.bench import bench
from ctta.cli.calibrate import calibrate
from ctta.cli.catalog import methods, protocols, recipes
from ctta.cli.command import MAX_WIDTH, Command, CommandGroup
from ctta.cli.console import print_text
from ctta.cli.corrupt import corrupt
from ctta.cli.data import data
from ctta.cli.demo import demo
from ctta.cli.report import report
from ctta.cli.serve import serve
from ctta.cli.source_stats import compute_source_stats

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)
for command in (demo, adapt, serve, calibrate, bench, report, recipes, protocols, methods, corrupt):
    app.command(cls=Command)(command)
app.command("source-stats", cls=Command)(compute_source_stats)
app.add_typer(data, name="data")


def _print_version(is_given: bool) -> None:
    if is_given:
        print_text(f"ctta {__version__} (Python {platform.python_version()}, torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Adapt vision models to their inputs, online and without labels: continual test-time adaptation."""
