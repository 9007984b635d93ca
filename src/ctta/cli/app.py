"""The commands, in the order in which ``ctta --help`` lists them; each is imported when it is used, torch with it."""

import platform
from importlib import metadata
from typing import Annotated, ClassVar

import typer

from ctta import __version__
from ctta.cli.command import MAX_WIDTH, LazyGroup
from ctta.cli.console import print_text


class _Commands(LazyGroup):
    """All commands: where each is, and what ``ctta --help`` says about it, the first line of its docstring."""

    members: ClassVar = {
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
            "ctta.cli.report:report",
            "Write the tables and plots of runs as one HTML page, Markdown, LaTeX, CSV, JSON, PNG and SVG.",
        ),
        "recipes": ("ctta.cli.catalog:recipes", "List the benchmarks that 'ctta bench' can run."),
        "protocols": (
            "ctta.cli.catalog:protocols",
            "List the protocols: the ways in which corruptions can arrive in 'ctta bench'.",
        ),
        "methods": (
            "ctta.cli.catalog:methods",
            "List the methods and presets, or describe one with its hyperparameters.",
        ),
        "corrupt": (
            "ctta.cli.data:corrupt",
            "Make a folder in the layout of CIFAR-C or ImageNet-C from clean images.",
        ),
        "source-stats": (
            "ctta.cli.data:compute_source_stats",
            "Compute statistics of source images for the methods that need them.",
        ),
        "data": (
            "ctta.cli.data:data",
            "Download public datasets and checkpoints, verified, to a cache folder.",
        ),
        "doctor": (
            "ctta.cli.catalog:doctor",
            "Check the installation: versions, devices, extras, what is missing and how to get it.",
        ),
    }


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
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
