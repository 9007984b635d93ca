"""Every long command says how far it is where standard error is no terminal, as in logs of CI, cron and nohup."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import invoke, write_images, write_network
from report_runs import CONTINUAL, write_all_methods, write_run

from ctta.cli.adapt import adapt
from ctta.cli.advise import advise
from ctta.cli.bench import bench
from ctta.cli.data import compute_source_stats, corrupt
from ctta.cli.report import report

Arguments = tuple[object, ...]


def images_of(folder: Path) -> Path:
    write_images(folder / "images", range(4))
    return folder / "images"


def adapt_arguments(folder: Path) -> Arguments:
    common = ("--model", write_network(folder), "--images", images_of(folder), "--method", "source")
    return (*common, "--out", folder / "out.csv", "--batch-size", 2)


def bench_arguments(folder: Path) -> Arguments:
    return ("demo", "--methods", "source", "--limit", 2, "--corruptions", "fog", "--out", folder / "run")


def advise_arguments(folder: Path) -> Arguments:
    write_images(folder / "clean", range(16))
    common = ("--model", write_network(folder), "--images", folder / "clean", "--out", folder / "ctta.toml")
    return (*common, "--methods", "bn_stats", "--corruptions", "fog", "--batch-size", 8, "--any-input")


def corrupt_arguments(folder: Path) -> Arguments:
    pixels = np.zeros((2, 16, 16, 3), np.uint8)
    np.savez(folder / "clean.npz", images=pixels, labels=np.zeros(2, np.int64))
    return (folder / "clean.npz", folder / "corrupted", "--corruptions", "fog,contrast")


def report_arguments(folder: Path) -> Arguments:
    return (write_all_methods(write_run(folder / "run"), CONTINUAL, num_batches=1), "--out", folder / "report")


def source_stats_arguments(folder: Path) -> Arguments:
    common = ("--model", write_network(folder), "--images", images_of(folder), "--batch-size", 2)
    return (*common, "--out", folder / "stats.safetensors")


@pytest.mark.parametrize(
    ("command", "make_arguments", "title"),
    [
        (adapt, adapt_arguments, "adapting"),
        (bench, bench_arguments, "demo"),
        (advise, advise_arguments, "advising"),
        (corrupt, corrupt_arguments, "corrupting"),
        (report, report_arguments, "reading"),
        (compute_source_stats, source_stats_arguments, "computing"),
    ],
    ids=["adapt", "bench", "advise", "corrupt", "report", "source-stats"],
)
def test_long_commands_print_lines(
    command: Any,
    make_arguments: Callable[[Path], Arguments],
    title: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = make_arguments(tmp_path)
    for name in ("SECONDS_BEFORE_FIRST_LINE", "SECONDS_BETWEEN_LINES"):
        monkeypatch.setattr(f"ctta.io.progress.{name}", 0.0)
    result = invoke(command, *arguments)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert lines and all(
        re.fullmatch(rf"{title}: \d+ of \d+ \(\d+ %\) after 0:\d\d:\d\d(, .* left)?", x) for x in lines
    )
    assert title not in result.stdout
