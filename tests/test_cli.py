"""The command ``ctta``: listings, benchmarks, and lines of progress where standard error is no terminal."""

import json
import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import invoke, write_images, write_network
from report_runs import CONTINUAL, write_all_methods, write_run
from rich.console import Console

from ctta import benchmark
from ctta.benchmark import RECIPES
from ctta.benchmark import run as run_benchmark
from ctta.benchmark.report import score_table
from ctta.cli import demo, main
from ctta.cli.adapt import adapt
from ctta.cli.advise import advise
from ctta.cli.bench import bench as bench_command
from ctta.cli.bench import print_table, report
from ctta.cli.data import compute_source_stats, corrupt
from ctta.core.registry import list_methods
from ctta.evaluation import read_result

NETWORK = """
import torch
from torch import nn

class NeedsBatches(nn.Module):
    # Fails unless its BatchNorm uses the statistics of the batch.

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        x = self.norm(x)
        if not self.norm.training:
            raise ValueError("no batch")
        return x.mean((2, 3)) @ torch.ones(3, 10)

def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).eval()
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a benchmark that takes seconds."""
    monkeypatch.chdir(tmp_path)
    Path("network.py").write_text(NETWORK)
    return [
        "bench",
        "embedded",
        "--model",
        "file:network.py:tiny",
        "--limit",
        "4",
        "--batch-size",
        "4",
        "--threads",
        "1",
    ]


def run(*arguments: str) -> int:
    """Run the command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    if isinstance(ended.value.code, str):
        sys.stderr.write(ended.value.code)
        return 1
    return ended.value.code or 0


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    names = "demo advise certify adapt serve bench report recipes methods corrupt data"
    for command in names.split():
        assert f" {command} " in text


def test_methods_and_recipes_list_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("methods", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list_methods()
    assert [row for row in rows if row["name"] == "tent"] == [
        {
            "name": "tent",
            "title": "TENT",
            "does": rows[3]["does"],
            "paper": "Wang et al., ICLR 2021",
            "trains": "norm layers",
            "forward_passes": 1,
            "backward_passes": 1,
            "networks": 2,
            "needs_source_data": False,
            "needs_vit": False,
            "settings": rows[3]["settings"] | {"optimizer": "Adam(lr=0.001)"},
        }
    ]
    assert run("recipes", "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [*RECIPES, "matrix", "detection"]
    assert run("methods") == 0
    text = capsys.readouterr().out
    assert re.search("pseudo_label +norm layers +1 +1 +2 +no +Lee, ICML workshop 2013", text)
    of_cotta = "cotta_official, cotta_official_segmentation, cotta_segmentation, cotta_paper, cotta_fast, cotta_faster"
    assert f"Presets: {of_cotta}, note_iid_stream, zerosiam_vit, neo_continual, vane_fast\n" in text
    assert run("methods", "--no-backward", "--json") == 0
    tier = {row["name"]: row["backward_passes"] for row in json.loads(capsys.readouterr().out)}
    assert {"source", "bn_stats", "t3a", "neo", "neo_continual", "unmix_tns", "foa"} <= tier.keys()
    assert set(tier.values()) == {0} and "tent" not in tier
    assert run("methods", "tent", "--no-backward") == 1
    assert "leave it out, or the name 'tent'" in capsys.readouterr().err
    assert run("methods", "cotta_fast") == 0
    text = capsys.readouterr().out
    assert text.startswith("cotta_fast: CoTTA fast (Wang et al., CVPR 2022)\n")
    assert re.search(r"views +ImageViews\(num_views=8,", text) and re.search("restore +0.01", text)
    assert run("recipes") == 0
    assert "cifar10c-gradual" in capsys.readouterr().out


def test_bench_prints_a_table_and_writes_a_report(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*bench, "--methods", "source,bn_stats", "--out", "mine") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    table = lines[: lines.index("")]
    assert [line.split()[0] for line in table if line.startswith(("Source", "BN"))] == ["Source", "BN"]
    assert "\n\nAll rows have the same mean error, 100.0 %; one order.\nReport: " in captured.out
    assert any("gau" in line and "jpe" in line and "mean" in line for line in lines)
    assert captured.err == ""  # no progress bars outside of a terminal
    assert Path("mine/report/report.html").is_file()
    assert run("report", "mine", "--out", "page") == 0
    assert Path("page/report.html").is_file()


def test_the_same_command_finds_its_run(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*bench, "--methods", "source") == 0
    (folder,) = Path("runs").iterdir()
    before = (folder / "cells/source-standard/batches.jsonl").stat().st_mtime_ns
    assert run(*bench, "--methods", "source", "--json") == 0
    assert (folder / "cells/source-standard/batches.jsonl").stat().st_mtime_ns == before
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["row"] == "source"
    assert len(line["errors"]) == 15
    assert run(*bench, "--methods", "source", "--set", "tent.lr=0.1") == 0
    assert len(list(Path("runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "cotta.restor=0.1"],
            "CoTTA has no setting 'restor' (did you mean 'restore'?); it has optimizer, lr, decay, restore",
        ),
        (["--set", "restore=0.1"], "expected a setting METHOD.NAME=VALUE"),
        (["--set", "cota.restore=0.1"], "does not have"),
        (["--set", "cotta.seed=3"], "choose seeds with the option 'seeds'"),
        (["--set", "tent.lr=abc"], "lr must be a number such as 0.001, got 'abc'"),
        (["--set", "tent.lr=-1"], "the optimizer does not take lr=-1: Invalid learning rate: -1"),
        (["--methods", "cota"], "no method 'cota'"),
        (["--seeds", "one"], "expected seeds as integers such as 1,2,3 or 1-5, got 'one'"),
        (["--orders", "11"], "order must be"),
        (["--preset", "best"], "'best' is not one of"),
        (["--limit", "0"], "greater than or equal to 1"),
    ],
)
def test_user_errors_are_one_line(
    bench: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*bench, *arguments) in (1, 2)
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "cifar11c"],
            "there is no recipe 'cifar11c' (did you mean 'cifar10c'?); choose one of demo, embedded",
        ),
        (["bench", "cifar10c"], "cifar10-c (2.9 GB) is not in the cache"),
        (["bench", "cifar10c", "--data", "nowhere"], "labels.npy is missing"),
        (["report", "nowhere"], "has no run.json"),
    ],
)
def test_missing_things_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CTTA_CACHE", str(tmp_path / "cache"))
    assert run(*arguments) == 1
    assert message in capsys.readouterr().err


def test_a_failed_cell_is_reported_and_sets_the_exit_code(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench[bench.index("file:network.py:tiny")] = "file:network.py:NeedsBatches"
    assert run(*bench, "--methods", "source,bn_stats") == 1
    captured = capsys.readouterr()
    assert (
        captured.err == "source-standard: ValueError: no batch\n1 of 2 cells failed and are missing from the table.\n"
    )
    assert "BN Stats" in captured.out


def test_a_table_is_transposed_in_a_narrow_terminal(bench: list[str]) -> None:
    assert run(*bench, "--methods", "source,bn_stats", "--out", "mine") == 0
    table = score_table([read_result(cell) for cell in sorted(Path("mine/cells").iterdir())])
    for width, heads in ((160, "gau"), (60, "BN Stats")):
        file = StringIO()
        print_table(table, Console(force_terminal=True, width=width, file=file, color_system=None))
        text = file.getvalue()
        assert heads in text
        assert "…" not in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def run_without_processes(recipe: str, **options: Any) -> benchmark.BenchmarkResult:
    assert options["workers"] == torch.get_num_threads()
    return run_benchmark(recipe, **options | {"workers": 0})


@pytest.mark.parametrize("full", [False, True])
def test_the_demo_runs_its_tables(
    bench: list[str], full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small network and a short stream, in this process: starting one for each cell takes most of the time."""
    monkeypatch.setattr(benchmark, "run", run_without_processes)
    for name, (recipe, methods, options) in {**demo.SHORT, **demo.FULL}.items():
        tasks = demo.SHORT if name in demo.SHORT else demo.FULL
        rounds = {"rounds": 2} if "rounds" in options else {}
        tiny = options | {"model": "file:network.py:tiny", "limit": 4, "batch_size": 4} | rounds
        monkeypatch.setitem(tasks, name, (recipe, methods, tiny))
    assert run("demo", *(["--full"] if full else [])) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^CoTTA ", text, re.MULTILINE)) == (4 if full else 2)  # CoTTA and CoTTA fast
    assert ("Without adaptation" in text) == (not full)
    assert ("round 2" in text) == full
    assert (Path("runs/demo") / ("report-full" if full else "report") / "report.html").is_file()


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
        (bench_command, bench_arguments, "demo"),
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
