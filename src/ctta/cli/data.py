"""``ctta data``: download the public datasets and checkpoints of the field."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ctta.cli.command import Command, CommandGroup
from ctta.cli.console import exit_on_interrupt, print_table_in_full, print_text
from ctta.cli.options import InsecureOption, JsonOption
from ctta.data.datasets import DATASETS, DownloadError, cache_dir, download, find

data = typer.Typer(
    cls=CommandGroup,
    help="Download public datasets and checkpoints, verified, to a cache folder.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

CacheOption = Annotated[
    Path | None, typer.Option(help="Use this cache folder. Default: $CTTA_CACHE or ~/.cache/ctta.", metavar="DIR")
]


@data.command(cls=Command)
def get(
    name: Annotated[
        str,
        typer.Argument(help="Download this one, such as cifar10-c; for a list see: ctta data list.", metavar="NAME"),
    ],
    cache: CacheOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Download a dataset or checkpoint unless it is cached, and print its path.

    After an error or Ctrl-C, run the same command again to resume the download.
    """
    with exit_on_interrupt():
        path = download(name, cache=cache, insecure=insecure)
    typer.echo(path)


@data.command("list", cls=Command)
def list_datasets(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """List the available downloads: size, license, what verifies them, and whether they are cached."""
    rows = [_row(name, cache) for name in DATASETS]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("name", "size", "license", "verified by", "cached", box=None, padding=(0, 2, 0, 0))
    table.columns[1].justify = "right"
    for row in rows:
        dataset, cached = DATASETS[row["name"]], "yes" if row["path"] else "no"
        checksum = row["checksum"] or "nothing"
        table.add_row(row["name"], dataset.size_text, dataset.license_text, checksum, cached)
    print_table_in_full(table)
    print_text(f"\nCache folder: {cache or cache_dir()}\nDownload with: ctta data get NAME")


def _row(name: str, cache: Path | None) -> dict[str, Any]:
    try:
        path = str(find(name, cache=cache))
    except DownloadError:  # absent, or damaged: 'ctta data get' says which
        path = None
    dataset = DATASETS[name]
    checksum = "sha256" if dataset.sha256 else "md5" if dataset.md5 else None
    size = dataset.size or dataset.approximate_size
    return {
        "name": name,
        "bytes": size,
        "license": dataset.license or None,
        "page": dataset.page,
        "checksum": checksum,
        "path": path,
    }
