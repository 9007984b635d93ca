"""The commands, in the order in which ``ctta --help`` lists them."""

import typer

from ctta.cli.adapt import adapt
from ctta.cli.bench import bench
from ctta.cli.calibrate import calibrate
from ctta.cli.catalog import methods, recipes
from ctta.cli.corrupt import corrupt
from ctta.cli.data import data
from ctta.cli.demo import demo
from ctta.cli.report import report
from ctta.cli.serve import serve

app = typer.Typer(
    help="Continual test-time adaptation: vision models that keep adapting to their inputs, online and without labels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, adapt, serve, calibrate, bench, report, recipes, methods, corrupt):
    app.command()(command)
app.add_typer(data, name="data")
