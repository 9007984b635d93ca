"""``ctta advise`` and ``ctta certify``: which method helps a network, and whether one harms it."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctta.advise import advise as run_advise
from ctta.advise import certify as run_certify
from ctta.advise.advice import AdviseOptions
from ctta.advise.certificate import CertifyOptions
from ctta.cli.console import print_text, resumable_progress
from ctta.cli.options import ConfigOptions, JsonOption, NetworkOptions, command
from ctta.core.options import Option

if TYPE_CHECKING:
    from ctta.advise import Advice, RaceRow

CleanImagesOption = Annotated[
    Path,
    Option(
        "Read clean images from a folder, with or without one subfolder per class, or from an .npz file.",
        "DIR|FILE.npz",
    ),
]


@command
def advise(
    *,
    network: NetworkOptions,
    images: CleanImagesOption,
    out: Annotated[Path, Option("Write the recommended configuration to this file.", "FILE")] = Path("ctta.toml"),
    options: AdviseOptions,
    as_json: JsonOption = False,
) -> None:
    """Find out whether adaptation helps your network, and which method and settings.

    Give clean images like those that the network was trained on, but not
    the same. Without labels, the answers of the network on the clean images
    count as right. First it checks that the network expects the images that
    it gets; a wrong normalization or size is reported at once. Then methods,
    the default first, adapt to the images under several corruptions: all on
    a part of them, the default and the best few on more. The recommendation
    is written to a file that 'ctta adapt --config' and 'ctta serve --config'
    read. After Ctrl-C or a kill, run the same command again to resume.
    """
    net, work = network.load(), out.with_name(f"{out.name}.progress")
    with resumable_progress("advising") as (on_progress, _):
        advice = run_advise(net, images, **vars(options) | {"folder": work, "on_progress": on_progress})
    advice.save(out, model=network.model, mean=network.mean, std=network.std, size=options.size)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        typer.echo(json.dumps(_as_json(advice) | {"out": str(out)}))
        return
    print_text(repr(advice))
    if not advice.network.input_check.is_expected:
        print_text(f"\nWritten to {out}, for the network as it is: correct its input first.")
        return
    print_text(f"\nWritten to {out}. Use it:\n")
    print_text(f"ctta adapt --config {out} --images DIR --out predictions.csv")
    print_text(f"ctta serve --config {out}")
    print_text(f'model = ctta.from_config("{out}")')


@command
def certify(
    *,
    images: CleanImagesOption,
    adaptation: ConfigOptions,
    out: Annotated[Path, Option("Write certificate.html and certificate.json to this folder.", "DIR")] = Path(
        "certificate"
    ),
    options: CertifyOptions,
    as_json: JsonOption = False,
) -> None:
    """Test whether a method harms your network: pass or fail against no adaptation, on one page.

    First it checks that the network expects the images that it gets. Then
    the method sees clean images, corrupted ones, other batch sizes, images
    sorted by class, twenty visits of the same corruptions and foreign images,
    each with several seeds, of which the worst counts. The page also says how
    many answers of a batch one hostile image can flip. The exit code is 1
    unless everything passes. After Ctrl-C or a kill, run the same command
    again to resume.
    """
    chosen = adaptation.choose()
    if chosen.method is None:
        raise typer.BadParameter("give --method NAME, or --config FILE with a method in it")
    changes = {
        "method": chosen.method,
        "settings": dict(text.split("=", 1) for text in chosen.texts),
        "size": chosen.size,
    } | ({} if chosen.batch_size is None else {"batch_size": chosen.batch_size})
    work = out.with_name(f"{out.name}.progress")
    with resumable_progress("testing") as (on_progress, _):
        given = vars(options) | changes | {"folder": work, "on_progress": on_progress}
        certificate = run_certify(chosen.net, images, **given)
    page = certificate.write(out)
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        typer.echo(json.dumps(certificate.to_json() | {"page": str(page)}, default=str))
    else:
        print_text(repr(certificate))
        print_text(f"\nPage: {page}")
    if not certificate.passed:
        raise typer.Exit(1)


def _as_json(advice: "Advice") -> dict[str, Any]:
    race = advice.race
    return {
        "network": asdict(advice.network),
        "data": asdict(advice.images),
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
