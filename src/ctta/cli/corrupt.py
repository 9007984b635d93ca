"""``ctta corrupt``: a benchmark folder from clean images."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.console import err, out
from ctta.cli.progress import progress_of_unknown_total
from ctta.corruptions import CORRUPTIONS, HOLD_OUT, write_cifar_c, write_imagenet_c
from ctta.datasets.clean_images import corruption_kind, read_clean_images

SETS = {"all": tuple(CORRUPTIONS), "hold-out": tuple(HOLD_OUT)}


class Kind(StrEnum):
    """The layout to write."""

    CIFAR = "cifar-c"
    IMAGENET = "imagenet-c"


def corrupt(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="CIFAR's python batches, an .npz or .npy of images, or a tree <class>/<picture>."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    corruptions: Annotated[
        str, typer.Option(help="Such as fog,snow; all (the fifteen of the benchmarks) or hold-out (four others).")
    ] = "all",
    severities: Annotated[
        str | None, typer.Option(help="Such as 3,5; only for imagenet-c, as CIFAR-C's files hold all five.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another draw.")] = 0,
    kind: Annotated[
        Kind | None, typer.Option(help="The layout; by default imagenet-c for a tree of pictures, else cifar-c.")
    ] = None,
    frost_photos: Annotated[
        Path | None, typer.Option(help="A folder of photographs for 'frost' instead of those shipped.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line for machines.")] = False,
) -> None:
    """Make a folder shaped like CIFAR-C or ImageNet-C from clean images.

    SRC is a folder with CIFAR's python batches (the test images are taken),
    an .npz with 'images' and 'labels', an .npy with a labels.npy beside it,
    or a tree of pictures. Stopped or killed, the same command keeps every
    complete file and goes on.
    """
    names = [name for part in _parts(corruptions) for name in SETS.get(part, (part,))]
    kind = kind or Kind(corruption_kind(source))
    if kind is Kind.CIFAR and severities is not None:
        raise ValueError(
            "a file of CIFAR-C holds all five severities, so --severities goes with --kind imagenet-c only"
        )
    strengths = _severities(severities)
    if (folder / "made_from.json").exists() and not as_json:
        err.print(f"{folder} was begun before: keeping its complete files and going on.", markup=False, soft_wrap=True)
    try:
        with progress_of_unknown_total("corrupting") as advance:
            if kind is Kind.CIFAR:
                clean = read_clean_images(source)
                if clean.labels is None:
                    raise ValueError(f"{source} has no labels, which CIFAR-C's layout needs: give an .npz with both")
                write_cifar_c(
                    clean.images,
                    clean.labels,
                    folder,
                    names=names,
                    seed=seed,
                    frost_photos=frost_photos,
                    progress=advance,
                )
            else:
                write_imagenet_c(
                    source,
                    folder,
                    names=names,
                    severities=strengths,
                    seed=seed,
                    frost_photos=frost_photos,
                    progress=advance,
                )
    except KeyboardInterrupt:
        err.print("\nStopped. The same command goes on where it was.")
        raise typer.Exit(130) from None
    reader = "CifarC" if kind is Kind.CIFAR else "ImageNetC"
    if as_json:
        summary = {
            "folder": str(folder),
            "kind": kind.value,
            "corruptions": names,
            "severities": strengths,
            "seed": seed,
        }
        typer.echo(json.dumps(summary))
        return
    text = f"{folder} holds {len(names)} corruptions, severities {', '.join(map(str, strengths))}."
    out.print(text, markup=False, soft_wrap=True)
    out.print(f'Read it with: ctta.datasets.{reader}("{folder}")', markup=False, soft_wrap=True)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _severities(text: str | None) -> list[int]:
    if text is None:
        return [1, 2, 3, 4, 5]
    parts = _parts(text)
    if not parts or any(part not in {"1", "2", "3", "4", "5"} for part in parts):
        raise ValueError(f"severities are whole numbers from 1 to 5, such as 3,5; got {text!r}")
    return sorted({int(part) for part in parts})
