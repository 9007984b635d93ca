"""``ctta data``: the public datasets and checkpoints of the field."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ctta.cli.console import err, out
from ctta.datasets import DATASETS, DownloadError, cache_dir, download, find

data = typer.Typer(
    help="Fetch public datasets and checkpoints once, verified, into a cache folder.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Cache = Annotated[Path | None, typer.Option(help="The cache folder; by default $CTTA_CACHE or ~/.cache/ctta.")]


@data.command()
def get(
    name: Annotated[str, typer.Argument(help="Such as cifar10-c; see: ctta data list")], cache: Cache = None
) -> None:
    """Fetch a dataset or checkpoint, unless it is there, and print its path.

    A download that broke off, or was stopped by Ctrl-C, goes on where it was
    when the command is run again.
    """
    try:
        path = download(name, cache=cache)
    except KeyboardInterrupt:
        err.print("\nStopped. The same command goes on where it was.")
        raise typer.Exit(130) from None
    typer.echo(path)


@data.command("list")
def list_datasets(
    cache: Cache = None, as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False
) -> None:
    """List what can be fetched, how large it is where that is known, and what is there already."""
    rows = [_row(name, cache) for name in DATASETS]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("name", "size", "in the cache", box=None, padding=(0, 2, 0, 0))
    table.columns[1].justify = "right"
    for row in rows:
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e9:.1f} GB"
        table.add_row(row["name"], size, "yes" if row["path"] else "no")
    out.print(table)
    out.print(f"\nThe cache is {cache or cache_dir()}. Fetch with: ctta data get NAME", soft_wrap=True, markup=False)


def _row(name: str, cache: Path | None) -> dict[str, Any]:
    try:
        path = str(find(name, cache=cache))
    except DownloadError:  # absent, or damaged, of which 'get' tells more
        path = None
    return {"name": name, "bytes": DATASETS[name].size, "path": path}
