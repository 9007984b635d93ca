"""``ctta certify``: whether a method harms a network, on one page."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ctta.cli.advise import SeverityOption
from ctta.cli.console import print_text, resumable_progress
from ctta.cli.options import (
    ArraySizeOption,
    CleanImagesOption,
    ConfigOption,
    DeviceOption,
    JsonOption,
    LabelsOption,
    MeanOption,
    OptionalModelOption,
    SettingsOption,
    StdOption,
    choose_adaptation,
)
from ctta.core.options import parse_names


def certify(
    images: CleanImagesOption,
    config: ConfigOption = None,
    model: OptionalModelOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Test this method or preset, such as tent (see: ctta methods). Default: that of --config.",
            metavar="NAME",
        ),
    ] = None,
    settings: SettingsOption = None,
    out: Annotated[
        Path, typer.Option(help="Write certificate.html and certificate.json to this folder.", metavar="DIR")
    ] = Path("certificate"),
    guard: Annotated[
        bool, typer.Option(help="Test the method inside a guard, as 'ctta adapt' and 'ctta serve' run it.")
    ] = True,
    tolerance: Annotated[
        float, typer.Option(min=0, max=100, help="Accept this many points more error than Source.", metavar="POINTS")
    ] = 2.0,
    seeds: Annotated[int, typer.Option(min=1, help="Test N seeds; the worst one counts.", metavar="N")] = 3,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Adapt to N images at a time. Default: that of --config, else 32.", metavar="N"),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Test these batch sizes as well.", metavar="LIST")] = "1,4,16,64",
    corruptions: Annotated[
        str, typer.Option(help="Corrupt the images in these ways before the clean ones.", metavar="NAMES")
    ] = "gaussian_noise,fog",
    severity: SeverityOption = 3.0,
    visits: Annotated[
        int, typer.Option(min=5, help="Repeat the corruptions N times; the last five count.", metavar="N")
    ] = 20,
    limit: Annotated[int, typer.Option(min=16, help="Use at most N randomly chosen images.", metavar="N")] = 640,
    labels: LabelsOption = None,
    size: ArraySizeOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Test whether a method harms your network: pass or fail against no adaptation, on one page.

    The method sees clean images, corrupted ones, other batch sizes, images
    sorted by class, twenty visits of the same corruptions and foreign images,
    each with several seeds, of which the worst counts. The page also says how
    many answers of a batch one hostile image can flip. The exit code is 1
    unless everything passes. After Ctrl-C or a kill, run the same command
    again to go on.
    """
    from ctta.advise import certify as run_certify

    chosen = choose_adaptation(
        config,
        model=model,
        method=method,
        texts=settings or [],
        mean=mean,
        std=std,
        size=size,
        device=device,
        batch_size=batch_size,
    )
    if chosen.method is None:
        raise typer.BadParameter("give --method NAME, or --config FILE with a method in it")
    work = out.with_name(f"{out.name}.progress")
    with resumable_progress("testing") as on_progress:
        certificate = run_certify(
            chosen.net,
            images,
            method=chosen.method,
            settings=dict(text.split("=", 1) for text in chosen.texts),
            guard=guard,
            batch_size=chosen.batch_size or 32,
            batch_sizes=[int(each) for each in parse_names(batch_sizes)],
            corruptions=parse_names(corruptions),
            severity=severity,
            num_seeds=seeds,
            num_visits=visits,
            tolerance=tolerance / 100,
            limit=limit,
            size=chosen.size,
            use_labels=labels,
            folder=work,
            on_progress=on_progress,
        )
    page = certificate.write(out)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        typer.echo(json.dumps(certificate.to_json() | {"page": str(page)}, default=str))
    else:
        print_text(repr(certificate))
        print_text(f"\nPage: {page}")
    if not certificate.passed:
        raise typer.Exit(1)
