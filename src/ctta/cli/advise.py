"""``ctta advise``: whether adaptation helps a network, and which method and settings."""

import json
import shutil
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctta.cli.console import print_text, resumable_progress
from ctta.cli.options import (
    ArraySizeOption,
    CleanImagesOption,
    DeviceOption,
    JsonOption,
    LabelsOption,
    MeanOption,
    ModelOption,
    StdOption,
    load_network,
)
from ctta.core.options import parse_channels, parse_names

if TYPE_CHECKING:
    from ctta.advise import Advice, RaceRow


class ClassOrder(StrEnum):
    """How the classes of a stream follow each other."""

    SHUFFLED = "shuffled"
    CORRELATED = "correlated"
    SORTED = "sorted"


CorruptionsOption = Annotated[
    str | None,
    typer.Option(
        help="Corrupt the images in these ways, such as fog,snow. "
        "Default: gaussian_noise,motion_blur,fog,contrast,jpeg_compression.",
        metavar="NAMES",
    ),
]
SeverityOption = Annotated[
    float, typer.Option(min=0, max=5, help="Corrupt them this strongly, above 0 and up to 5.", metavar="N")
]
OrderOption = Annotated[
    ClassOrder,
    typer.Option(
        help="Show classes as your stream does: shuffled; correlated, a few at a time, as a camera sees them; or "
        "sorted, one after the other.",
        metavar="|".join(ClassOrder),
    ),
]
StepSizeOption = Annotated[
    int, typer.Option(min=1, help="Adapt to N images at a time; use the number of your application.", metavar="N")
]


def advise(
    model: ModelOption,
    images: CleanImagesOption,
    out: Annotated[Path, typer.Option(help="Write the recommended configuration to this file.", metavar="FILE")] = Path(
        "ctta.toml"
    ),
    labels: LabelsOption = None,
    batch_size: StepSizeOption = 32,
    order: OrderOption = ClassOrder.SHUFFLED,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Try these methods, such as tent,cotta_fast or file:PATH.py:Class (see: ctta methods). "
            "Default: all that can work.",
            metavar="NAMES",
        ),
    ] = None,
    corruptions: CorruptionsOption = None,
    severity: SeverityOption = 3.0,
    limit: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Use at most N randomly chosen images. Default: 512, or ten batches if that is more.",
            metavar="N",
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            min=0.01, help="Take about this many minutes; slow methods are left out for it.", metavar="MINUTES"
        ),
    ] = 10.0,
    any_input: Annotated[
        bool,
        typer.Option("--any-input", help="Go on even if the network clearly expects images in another normalization."),
    ] = False,
    size: ArraySizeOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    device: DeviceOption = "cpu",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed the choice of images, the corruptions and the order.", metavar="N")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Find out whether adaptation helps your network, and which method and settings.

    Give clean images like those that the network was trained on, but not
    the same. Without labels, the answers of the network on the clean images
    count as right. First it checks that the network expects the images that
    it gets; a wrong normalization is reported at once. Then methods adapt to
    the images under several corruptions: all on a part of them, the best few
    on more. The recommendation is written to a file that 'ctta adapt
    --config' and 'ctta serve --config' read. After Ctrl-C or a kill, run the
    same command again to go on.
    """
    from ctta.advise import advise as run_advise
    from ctta.advise.pictures import DEFAULT_CORRUPTIONS

    net = load_network(model, device, mean, std)
    work = out.with_name(f"{out.name}.progress")
    with resumable_progress("advising") as on_progress:
        advice = run_advise(
            net,
            images,
            batch_size=batch_size,
            order=order.value,
            methods=parse_names(methods) if methods else None,
            corruptions=parse_names(corruptions) if corruptions else DEFAULT_CORRUPTIONS,
            severity=severity,
            limit=limit,
            budget=budget,
            size=size,
            use_labels=labels,
            check_normalization=not any_input,
            folder=work,
            seed=seed,
            on_progress=on_progress,
        )
    channels = [None if each is None else parse_channels(each) for each in (mean, std)]
    advice.save(out, model=model, mean=channels[0], std=channels[1], size=size)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        typer.echo(json.dumps(_as_json(advice) | {"out": str(out)}))
        return
    print_text(repr(advice))
    print_text(f"\nWritten to {out}. Use it:\n")
    print_text(f"ctta adapt --config {out} --images DIR --out predictions.csv")
    print_text(f"ctta serve --config {out}")
    print_text(f'model = ctta.from_config("{out}")')


def _as_json(advice: "Advice") -> dict[str, Any]:
    race = advice.race
    return {
        "network": asdict(advice.network),
        "pictures": asdict(advice.pictures),
        "stream": asdict(advice.settings),
        "images": race.num_final,
        "source": _row_as_json(race.source),
        "finalists": [_row_as_json(row) for row in race.finalists],
        "dropped": [_row_as_json(row) for row in race.dropped],
        "left_out": race.left_out,
        "recommended": advice.recommended.candidate.key,
        "cheap": advice.cheap.candidate.key,
        "python": advice.python,
    }


def _row_as_json(row: "RaceRow") -> dict[str, Any]:
    return {
        "method": row.candidate.method,
        "settings": row.candidate.settings,
        "error": row.result.error,
        "errors": dict(zip(row.result.domains, row.result.errors, strict=True)),
        "difference": row.difference and {"low": row.difference.low, "high": row.difference.high},
        "ms_per_image": row.result.ms_per_image,
        "memory_bytes": row.memory,
    }
