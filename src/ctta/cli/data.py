"""``ctta data``, ``ctta corrupt`` and ``ctta source-stats``: get datasets, and make what others need."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from ctta.cli.app import Command, CommandGroup
from ctta.cli.console import exit_on_interrupt, print_notice, print_rows, print_text, progress_bar
from ctta.cli.options import JsonOption, NetworkOptions, command, parse_severities
from ctta.core.options import Insecure, Option, Size, parse_names
from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT, write_cifar_c, write_imagenet_c
from ctta.data.corruptions.writers import SETTINGS_FILE
from ctta.data.datasets import DATASETS, DownloadError, cache_dir, download, find
from ctta.data.datasets.clean import infer_benchmark_layout, read_clean_images
from ctta.errors import ConfigError, DataError
from ctta.source_stats import source_stats

data = typer.Typer(
    cls=CommandGroup,
    help="Download public datasets and checkpoints, verified, to a cache folder.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

CacheOption = Annotated[Path | None, Option("Use this cache folder. Default: $CTTA_CACHE or ~/.cache/ctta.", "DIR")]


@data.command(cls=Command)
@command
def get(
    *,
    name: Annotated[
        str,
        typer.Argument(help="Download this one, such as cifar10-c; for a list see: ctta data list.", metavar="NAME"),
    ],
    cache: CacheOption = None,
    insecure: Insecure = False,
) -> None:
    """Download a dataset or checkpoint unless it is cached, and print its path.

    After an error or Ctrl-C, run the same command again to resume the download.
    """
    with exit_on_interrupt():
        path = download(name, cache=cache, insecure=insecure)
    typer.echo(path)


@data.command("list", cls=Command)
@command
def list_datasets(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """List the available downloads: size, license, what verifies them, and whether they are cached."""
    rows = [_row(name, cache) for name in DATASETS]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    texts = []
    for row in rows:
        dataset, cached = DATASETS[row["name"]], "yes" if row["path"] else "no"
        checksum = row["checksum"] or "nothing"
        texts.append((row["name"], dataset.size_text, dataset.license_text, checksum, cached))
    print_rows(("name", "size", "license", "verified by", "cached"), texts, right="size")
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


SETS = {"all": tuple(CORRUPTIONS), "hold-out": tuple(HOLD_OUT)}


@command
def corrupt(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="Read CIFAR's python batches, an .npz or .npy file, or a folder with a subfolder of images per class.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Write to this folder.")],
    corruptions: Annotated[
        str,
        Option("Apply these, such as fog,snow; all (the 15 of the benchmarks) or hold-out (the 4 others).", "NAMES"),
    ] = "all",
    severities: Annotated[
        str | None,
        Option(
            "Write these severities, such as 3,5 or 2.25; imagenet-c only, the files of cifar-c contain all five. "
            "Default: all five.",
            "LIST",
        ),
    ] = None,
    seed: Annotated[int, Option("Seed the random draws of the corruptions.", "N", min=0)] = 0,
    kind: Annotated[
        Literal["cifar-c", "imagenet-c"] | None,
        Option("Write this layout. Default: imagenet-c for a folder of images, else cifar-c."),
    ] = None,
    crop: Annotated[
        bool,
        Option(
            "Resize the shorter side of each image to 256 and crop the central 224x224, as was done for ImageNet-C. "
            "imagenet-c only. Default: keep the size."
        ),
    ] = False,
    frost_photos: Annotated[
        Path | None, Option("Take the photos of 'frost' from this folder. Default: those included.", "DIR")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a folder in the layout of CIFAR-C or ImageNet-C from clean images.

    SRC is a folder with CIFAR's python batches (the test images are used), an
    .npz file with 'images' and 'labels', an .npy file with a labels.npy next
    to it, or a folder of images. After a kill or Ctrl-C, run the same command
    again to resume: complete files are kept.
    """
    names = [name for part in parse_names(corruptions) for name in SETS.get(part, (part,))]
    layout = kind or infer_benchmark_layout(source)
    if layout == "cifar-c" and severities is not None:
        raise ConfigError("--severities requires --kind imagenet-c: a file of CIFAR-C contains all five severities")
    if layout == "cifar-c" and crop:
        raise ConfigError("--crop requires --kind imagenet-c: files of CIFAR-C keep the size of the images")
    levels: list[float] = [1, 2, 3, 4, 5] if severities is None else parse_severities(severities)
    if (folder / SETTINGS_FILE).exists() and not as_json:
        print_notice(f"Resuming {folder}: complete files are kept.")
    with exit_on_interrupt(), progress_bar("corrupting") as update:
        if layout == "cifar-c":
            clean = read_clean_images(source)
            if clean.labels is None:
                raise DataError(f"{source} has no labels, which the layout of CIFAR-C needs: use an .npz with both")
            write_cifar_c(
                clean.images, clean.labels, folder, names=names, seed=seed, frost_photos=frost_photos, progress=update
            )
        else:
            write_imagenet_c(
                source,
                folder,
                names=names,
                severities=levels,
                seed=seed,
                crop=crop,
                frost_photos=frost_photos,
                progress=update,
            )
    if as_json:
        made = {"corruptions": names, "severities": levels, "seed": seed}
        typer.echo(json.dumps({"folder": str(folder), "kind": layout, **made}))
        return
    reader = "CifarC" if layout == "cifar-c" else "ImageNetC"
    counted = f"{len(names)} corruption{'s' * (len(names) > 1)}"
    at = f"severit{'ies' if len(levels) > 1 else 'y'} {', '.join(map(str, levels))}"
    print_text(f"{folder} contains {counted} at {at}.")
    print_text(f'Read it with: ctta.data.datasets.{reader}("{folder}")')


@command
def compute_source_stats(
    *,
    network: NetworkOptions,
    images: Annotated[
        Path,
        Option(
            "Read source images from a folder, with or without one subfolder per class, or from an .npz file.",
            "DIR|FILE.npz",
        ),
    ],
    output: Annotated[Path, Option("Write the statistics to this file.", "FILE.safetensors", "--out")],
    labels: Annotated[
        bool, Option("Take classes from the labels of the images, not from the network's predictions.")
    ] = False,
    limit: Annotated[int, Option("Use at most N randomly chosen images.", "N", min=1)] = 2000,
    batch_size: Annotated[
        int, Option("Read N images at a time; use the number of your application.", "N", min=1)
    ] = 200,
    batch_stats: Annotated[
        float,
        Option(
            "Normalize by this part of each batch's own statistics, as methods do; 0 for petta, whose source is the "
            "network as it was trained.",
            "FRACTION",
            min=0,
            max=1,
        ),
    ] = 1.0,
    blocks: Annotated[
        bool, Option("Compute also the covariances of the tokens after each block of a vision transformer, for pea.")
    ] = False,
    head: Annotated[
        str | None, Option("Use this module as the classifier, such as fc. Default: found.", "NAME")
    ] = None,
    size: Size = None,
    seed: Annotated[int, Option("Seed the choice of images.", "N", min=0)] = 0,
) -> None:
    """Compute statistics of source images for the methods that need them.

    Fisher information, class prototypes and statistics of layers are written
    to one file, which belongs to this network. Give it to a method with
    --set source_stats=FILE, or in Python with ctta.SourceStats.load(FILE).
    """
    clean = read_clean_images(images, size=size, limit=limit, seed=seed)
    if labels and clean.labels is None:
        raise ConfigError(f"{images} has no labels: leave out --labels, or give one subfolder per class")
    net = network.load()
    pixels = torch.from_numpy(clean.images).permute(0, 3, 1, 2)
    given = torch.from_numpy(clean.labels) if labels and clean.labels is not None else None
    with exit_on_interrupt("Nothing was written."), progress_bar("computing") as update:

        def read_batches() -> Iterator[Tensor]:
            num_done = 0
            for part in pixels.split(batch_size):
                update(num_done, len(pixels))
                yield part.float().div(255)
                num_done += len(part)

        stats = source_stats(net, read_batches(), given, blocks=blocks, head=head, batch_stats=batch_stats)
    stats.save(output)
    print_text(f"Wrote {', '.join(stats.names)} of {stats.num_images} images to {output}.")
