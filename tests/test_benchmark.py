"""Benchmarks as a user runs them: what is planned, what is refused, what comes back."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import NETWORK, count_batches, plan_run, read_records, write_network

import ctta.benchmark
from ctta.benchmark import BenchmarkRun, JobOutcome, ProcessExecutor, SerialExecutor, execute
from ctta.benchmark.executors import ProgressCounter
from ctta.errors import ConfigError, DataError
from ctta.evaluation import BatchRecord


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_network(tmp_path)


def run_benchmark(**changes: Any) -> ctta.benchmark.BenchmarkResult:
    arguments: dict[str, Any] = {"methods": ["source", "tent"], "model": "file:network.py:tiny", "limit": 8}
    return ctta.benchmark.run("embedded", **arguments | {"batch_size": 4, "threads": 1} | changes)


@pytest.mark.usefixtures("network")
def test_run_returns_results_and_writes_the_report() -> None:
    progress: list[tuple[int, int]] = []
    outcomes: list[JobOutcome] = []
    outcome = run_benchmark(
        folder="mine", on_progress=lambda *counts: progress.append(counts), on_outcome=outcomes.append
    )
    assert [result.method for result in outcome.results] == ["Source", "TENT-continual"]
    assert all(result.is_complete and len(result.errors) == 15 for result in outcome.results)
    assert outcome.failures == ()
    assert outcome.report == Path("mine/report/report.html")
    assert "TENT-continual" in outcome.report.read_text()
    assert progress[-1] == (60, 60)
    assert [each.cell.method for each in outcomes] == ["source", "tent"]
    (command,) = json.loads(Path("mine/run.json").read_text())["commands"]
    assert command.startswith("ctta.benchmark.run('embedded', methods=['source', 'tent'], model='file:/")


@pytest.mark.usefixtures("network")
def test_same_call_finds_its_run_folder_again() -> None:
    first = run_benchmark(methods=["source"], report=False)
    assert first.report is None
    assert first.run.folder.parent == Path("runs")
    outcomes: list[JobOutcome] = []
    again = run_benchmark(methods=["source"], report="page", on_outcome=outcomes.append)
    assert again.run.folder == first.run.folder
    assert again.results == first.results
    assert outcomes == []
    assert again.report == Path("page/report.html")
    assert run_benchmark(methods=["source"], report=False, settings={"tent.lr": 0.1}).run.folder != first.run.folder


@pytest.mark.usefixtures("network")
def test_settings_are_a_mapping_or_texts() -> None:
    mapping = run_benchmark(methods=["tent"], settings={"tent.lr": 0.5}, report=False)
    texts = run_benchmark(methods=["tent"], settings=["tent.lr=0.5"], report=False)
    assert mapping.run.folder == texts.run.folder
    assert mapping.results[0].settings["optimizer"] == "Adam(lr=0.5)"
    with pytest.raises(TypeError, match="mapping or a list of texts"):
        run_benchmark(settings="tent.lr=0.5")


@pytest.mark.usefixtures("network")
def test_script_without_a_main_guard_can_use_workers() -> None:
    Path("script.py").write_text(
        "import ctta\n"
        "outcome = ctta.benchmark.run('embedded', methods=['source', 'bn_stats'], model='file:network.py:tiny',\n"
        "                             limit=4, batch_size=4, workers=2, threads=1, report=False)\n"
        "print(len(outcome.results), outcome.failures)\n"
    )
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("2 ()\n", "")


def test_failed_cells_do_not_stop_the_others(network: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs_batches = """
class NeedsBatchStatistics(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            raise RuntimeError("no batch statistics")
        return super().forward(x)

def tiny():
    return nn.Sequential(NeedsBatchStatistics(3), nn.Flatten(), nn.Linear(3072, 10)).eval()
"""
    network.write_text(NETWORK + needs_batches)
    outcome = run_benchmark(methods=["source", "bn_stats"])
    assert [result.method for result in outcome.results] == ["BN Stats Adapt"]
    (failure,) = outcome.failures
    assert failure.cell.method == "source"
    assert failure.error == "RuntimeError: no batch statistics"
    (record,) = caplog.records
    assert record.getMessage() == "cell source-standard failed"
    assert record.exc_info is not None and record.exc_info[0] is RuntimeError  # a handler prints its traceback


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"methods": "source"}, TypeError, r"methods must be a list, got 'source': give \['source'\]"),
        ({"limit": 0}, ConfigError, "limit must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be an integer of at least 1, got 2.5"),
        ({"preset": "best"}, ConfigError, "preset must be one of 'official', 'paper', got 'best'"),
    ],
    ids=["methods", "limit", "batch_size", "preset"],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_benchmark(**changes)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    "places", [{"workers": 2, "ray": "local"}, {"workers": 2, "executor": SerialExecutor()}], ids=["ray", "executor"]
)
def test_cells_run_in_one_place_only(places: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run_benchmark(**places)


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("places", [{"workers": 2}, {"ray": "local"}, {"executor": ProcessExecutor(2)}])
def test_processes_of_torchrun_share_each_cell(places: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # By module: the attribute `run` of the package is the function.
    monkeypatch.setattr(sys.modules["ctta.benchmark.run"], "world_size", lambda: 2)
    with pytest.raises(ConfigError):
        run_benchmark(**places)


def test_plan_has_a_cell_for_every_seed_of_a_random_method(tmp_path: Path, network: Path) -> None:
    names = [cell.name for cell in plan_run(tmp_path / "run", network, orders=(None, 3)).cells]
    assert names == [
        "source-standard",
        "source-order3",
        "tent_online-standard",
        "tent_online-order3",
        "cotta-standard-seed1",
        "cotta-standard-seed2",
        "cotta-order3-seed1",
        "cotta-order3-seed2",
    ]


def test_duplicates_run_once(tmp_path: Path, network: Path) -> None:
    run = plan_run(tmp_path / "run", network, methods=("cotta", "cotta"), seeds=(1, 1, 2))
    assert [cell.name for cell in run.cells] == ["cotta-standard-seed1", "cotta-standard-seed2"]


def test_folder_takes_further_cells_but_no_other_options(tmp_path: Path, network: Path) -> None:
    run = plan_run(tmp_path / "run", network, methods=("source",))
    execute(run, SerialExecutor())
    more = plan_run(tmp_path / "run", network, methods=("source", "bn_stats"))
    assert count_batches(more) == run.num_batches
    assert more.num_batches == 2 * run.num_batches
    with pytest.raises(ConfigError, match="threads: 1"):
        plan_run(tmp_path / "run", network, threads=2)
    with pytest.raises(ConfigError, match=r"options\.model"):
        plan_run(tmp_path / "run", network, "other")


def test_complete_cells_are_kept_but_not_mixed_with_another_network(tmp_path: Path, network: Path) -> None:
    """An update of a library must not make finished results unusable; another network must."""
    run = plan_run(tmp_path / "run", network, methods=("source",))
    execute(run, SerialExecutor())
    about = Path(run.cells[0].folder) / "about.json"
    about.write_text(about.read_text().replace('"torch": "', '"torch": "0.'))
    again = plan_run(tmp_path / "run", network, methods=("source", "bn_stats"))
    outcomes: list[JobOutcome] = []
    assert execute(again, SerialExecutor(), on_outcome=outcomes.append) == []
    assert [outcome.cell.method for outcome in outcomes] == ["bn_stats"]
    network.write_text(NETWORK.replace("manual_seed(0)", "manual_seed(1)"))
    recorded = (tmp_path / "run" / "run.json").read_text()
    with pytest.raises(ConfigError):
        plan_run(tmp_path / "run", network, methods=("source",), command="refused")
    assert (tmp_path / "run" / "run.json").read_text() == recorded  # the report shows what made the results


@pytest.mark.parametrize(
    "file", ["run.json", "cells/source-standard/about.json", "cells/source-standard/batches.jsonl"]
)
def test_damaged_files_are_named(tmp_path: Path, network: Path, file: str) -> None:
    run = plan_run(tmp_path / "run", network, methods=("source",))
    execute(run, SerialExecutor())
    for damaged in ("{\n", "{}\n"):
        (run.folder / file).write_text(damaged)
        with pytest.raises(DataError, match=f"{file} (is damaged|was written by another version)"):
            plan_run(run.folder, network, methods=("source",))


def test_progress_is_counted_in_the_files(tmp_path: Path, network: Path) -> None:
    run = plan_run(tmp_path / "run", network, methods=("source",))
    counter = ProgressCounter(run)
    file = Path(run.cells[0].folder) / "batches.jsonl"
    file.parent.mkdir(parents=True)
    for text, expected_count in (("a\nb\n", 2), ("a\nb\nc\nd", 3), ("a\nb\nc\nd\n", 4), ("a\n", 1)):
        file.write_text(text)
        assert counter.count() == expected_count


@pytest.mark.parametrize(
    ("plan_wrongly", "message"),
    [
        (
            lambda folder, network: plan_run(folder, network, methods=("cota",)),
            "there is no method 'cota' .* expected one of source,",
        ),
        (lambda folder, network: plan_run(folder, network, orders=(12,)), "order must be None"),
        (lambda folder, network: plan_run(folder, network, seeds=()), "seeds is an empty list"),
        (lambda folder, network: plan_run(folder, network, "broken"), "network.py failed with ValueError: no such"),
    ],
    ids=["method", "order", "seeds", "network"],
)
def test_mistakes_are_found_before_a_cell_starts(
    tmp_path: Path, network: Path, plan_wrongly: Callable[[Path, Path], BenchmarkRun], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_wrongly(tmp_path / "run", network)
    assert not (tmp_path / "run").exists()


def test_stopped_serial_run_resumes_to_the_same_results(tmp_path: Path, network: Path) -> None:
    num_left = 12

    def stop(_record: BatchRecord) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise KeyboardInterrupt

    stopped, whole = (plan_run(tmp_path / name, network, methods=("tent_online",)) for name in ("stopped", "whole"))
    with pytest.raises(KeyboardInterrupt):
        execute(stopped, SerialExecutor(on_batch=stop))
    assert count_batches(stopped) == 12
    for run in (stopped, whole):
        execute(run, SerialExecutor())
    assert read_records(stopped) == read_records(whole)
