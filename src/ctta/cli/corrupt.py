"""``ctta corrupt``: make a corruption benchmark from clean images."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.console import exit_on_interrupt, print_notice, print_text, progress_bar
from ctta.cli.options import JsonOption, parse_severities
from ctta.core.options import parse_names
from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT, write_cifar_c, write_imagenet_c
from ctta.data.corruptions.writers import SETTINGS_FILE
from ctta.data.datasets.clean_images import infer_benchmark_layout, read_clean_images
from ctta.errors import ConfigError, DataError

SETS = {"all": tuple(CORRUPTIONS), "hold-out": tuple(HOLD_OUT)}


class BenchmarkLayout(StrEnum):
    """Layout of the written folder."""

    CIFAR = "cifar-c"
    IMAGENET = "imagenet-c"


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
        typer.Option(
            help="Apply these, such as fog,snow; all (the 15 of the benchmarks) or hold-out (the 4 others).",
            metavar="NAMES",
        ),
    ] = "all",
    severities: Annotated[
        str | None,
        typer.Option(
            help="Write these severities, such as 3,5 or 2.25; imagenet-c only, the files of cifar-c contain all five. "
            "Default: all five.",
            metavar="LIST",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed the random draws of the corruptions.", metavar="N")] = 0,
    kind: Annotated[
        BenchmarkLayout | None,
        typer.Option(
            help="Write this layout. Default: imagenet-c for a folder of images, else cifar-c.",
            metavar="|".join(BenchmarkLayout),
        ),
    ] = None,
    crop: Annotated[
        bool,
        typer.Option(
            "--crop",
            help="Resize the shorter side of each image to 256 and crop the central 224x224, as was done for "
            "ImageNet-C. imagenet-c only. Default: keep the size.",
        ),
    ] = False,
    frost_photos: Annotated[
        Path | None,
        typer.Option(help="Take the photos of 'frost' from this folder. Default: those included.", metavar="DIR"),
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
    layout = kind or BenchmarkLayout(infer_benchmark_layout(source))
    if layout is BenchmarkLayout.CIFAR and severities is not None:
        raise ConfigError("--severities requires --kind imagenet-c: a file of CIFAR-C contains all five severities")
    if layout is BenchmarkLayout.CIFAR and crop:
        raise ConfigError("--crop requires --kind imagenet-c: files of CIFAR-C keep the size of the images")
    levels: list[float] = [1, 2, 3, 4, 5] if severities is None else parse_severities(severities)
    if (folder / SETTINGS_FILE).exists() and not as_json:
        print_notice(f"Resuming {folder}: complete files are kept.")
    with exit_on_interrupt(), progress_bar("corrupting") as update:
        if layout is BenchmarkLayout.CIFAR:
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
        summary = {
            "folder": str(folder),
            "kind": layout.value,
            "corruptions": names,
            "severities": levels,
            "seed": seed,
        }
        typer.echo(json.dumps(summary))
        return
    reader = "CifarC" if layout is BenchmarkLayout.CIFAR else "ImageNetC"
    counted = f"{len(names)} corruption{'s' * (len(names) > 1)}"
    at = f"severit{'ies' if len(levels) > 1 else 'y'} {', '.join(map(str, levels))}"
    print_text(f"{folder} contains {counted} at {at}.")
    print_text(f'Read it with: ctta.data.datasets.{reader}("{folder}")')
