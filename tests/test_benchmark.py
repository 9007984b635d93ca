"""Cells in every place: the same results, whatever dies on the way."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ctta.benchmark import (
    BenchmarkOptions,
    BenchmarkRun,
    JobOutcome,
    ProcessExecutor,
    ProgressCounter,
    RayExecutor,
    SerialExecutor,
    execute,
    plan,
)
from ctta.evaluation.results import BatchRecord, read_result

#: A network for a cell in any process; it kills its process where a file tells it to.
NETWORK = """
import os, signal
from pathlib import Path
import torch
from torch import nn

def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).eval()

other = tiny

def deadly():
    lives = Path(__file__).with_name("lives")
    left = int(lives.read_text()) if lives.exists() else 0
    if left:
        lives.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return tiny()

def broken():
    raise ValueError("no such weights")
"""
METHODS = ("source", "tent_online", "cotta")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "network.py"
    path.write_text(NETWORK)
    return path


def planned(folder: Path, network: Path, function: str = "tiny", **changes: object) -> BenchmarkRun:
    options = BenchmarkOptions(model=f"file:{network}:{function}", limit=8, batch_size=4, settings=("cotta.views=1",))
    arguments = {"methods": METHODS, "seeds": (1, 2), "threads": 1, "save_every": 0.0, **changes}
    return plan(folder, "embedded", options, **arguments)  # type: ignore[arg-type]


def done(run: BenchmarkRun) -> int:
    return ProgressCounter(run).count()


def outcome(run: BenchmarkRun) -> dict[str, list[BatchRecord]]:
    """Everything about the cells but time and memory."""
    results = {cell.name: read_result(Path(cell.folder)) for cell in run.cells}
    assert all(result.is_complete for result in results.values())
    return {
        name: [replace(batch, seconds=0.0, peak_mib=0) for batch in result.batches] for name, result in results.items()
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[BatchRecord]]:
    folder = tmp_path_factory.mktemp("expected")
    (folder / "network.py").write_text(NETWORK)
    run = planned(folder / "run", folder / "network.py")
    assert execute(run, SerialExecutor()) == []
    return outcome(run)


def test_a_plan_has_a_cell_for_every_seed_of_what_is_random(tmp_path: Path, network: Path) -> None:
    names = [cell.name for cell in planned(tmp_path / "run", network, orders=(None, 3)).cells]
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


def test_a_folder_takes_further_cells_but_no_other_options(tmp_path: Path, network: Path) -> None:
    run = planned(tmp_path / "run", network, methods=("source",))
    execute(run, SerialExecutor())
    more = planned(tmp_path / "run", network, methods=("source", "bn_stats"))
    assert done(more) == run.num_batches
    assert more.num_batches == 2 * run.num_batches
    with pytest.raises(ValueError, match="threads: 1 → 2"):
        planned(tmp_path / "run", network, threads=2)
    with pytest.raises(ValueError, match=r"model: .* → "):
        planned(tmp_path / "run", network, "other")


def test_complete_cells_are_left_alone_but_not_mixed_with_another_network(tmp_path: Path, network: Path) -> None:
    """An update of a library must not make finished results unusable; another network must."""
    run = planned(tmp_path / "run", network, methods=("source",))
    execute(run, SerialExecutor())
    about = Path(run.cells[0].folder) / "about.json"
    about.write_text(about.read_text().replace('"torch": "', '"torch": "0.'))
    again = planned(tmp_path / "run", network, methods=("source", "bn_stats"))
    outcomes: list[JobOutcome] = []
    assert execute(again, SerialExecutor(), on_outcome=outcomes.append) == []
    assert [outcome.cell.method for outcome in outcomes] == ["bn_stats"]
    network.write_text(NETWORK.replace("manual_seed(0)", "manual_seed(1)"))
    noted = (tmp_path / "run" / "run.json").read_text()
    with pytest.raises(ValueError, match=r"network: .* → "):
        planned(tmp_path / "run", network, methods=("source",), command="refused")
    assert (tmp_path / "run" / "run.json").read_text() == noted  # the report shows what made the results


def test_progress_is_counted_in_the_files(tmp_path: Path, network: Path) -> None:
    run = planned(tmp_path / "run", network, methods=("source",))
    progress = ProgressCounter(run)
    file = Path(run.cells[0].folder) / "batches.jsonl"
    file.parent.mkdir(parents=True)
    for text, expected_count in (("a\nb\n", 2), ("a\nb\nc\nd", 3), ("a\nb\nc\nd\n", 4), ("a\n", 1)):
        file.write_text(text)
        assert progress.count() == expected_count


def test_what_is_named_twice_is_run_once(tmp_path: Path, network: Path) -> None:
    run = planned(tmp_path / "run", network, methods=("cotta", "cotta"), seeds=(1, 1, 2))
    assert [cell.name for cell in run.cells] == ["cotta-standard-seed1", "cotta-standard-seed2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("cota",)}, "has no method 'cota'; it has source,"),
        ({"orders": (12,)}, "order must be None"),
        ({"seeds": ()}, "seeds is an empty list"),
        ({"function": "broken"}, "no such weights"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    tmp_path: Path, network: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        planned(tmp_path / "run", network, **changes)
    assert not (tmp_path / "run").exists()


def test_processes_give_the_same_results(tmp_path: Path, network: Path, expected: dict[str, list[BatchRecord]]) -> None:
    run = planned(tmp_path / "run", network)
    assert execute(run, ProcessExecutor(2)) == []
    assert outcome(run) == expected


def test_a_cell_whose_process_dies_is_tried_again_and_reported(tmp_path: Path, network: Path) -> None:
    run = planned(tmp_path / "run", network, "deadly", methods=("source", "bn_stats"))
    (tmp_path / "lives").write_text("2")
    outcomes: list[JobOutcome] = []
    assert execute(run, ProcessExecutor(1), on_outcome=outcomes.append) == []
    died = [outcome for outcome in outcomes if outcome.process_died]
    assert len(died) == 2
    assert all(outcome.will_retry and "exit code -9" in str(outcome.error) for outcome in died)
    outcome(run)


def test_a_cell_that_always_dies_is_given_up_and_the_others_go_on(tmp_path: Path, network: Path) -> None:
    """The two cells die in turn, so that the first has used up its three attempts when the second lives."""
    run = planned(tmp_path / "run", network, "deadly", methods=("source", "bn_stats"))
    (tmp_path / "lives").write_text("5")
    (failed,) = execute(run, ProcessExecutor(1))
    assert failed.cell.method == "source"
    assert failed.process_died
    assert not failed.will_retry
    assert read_result(Path(run.cells[1].folder)).is_complete


def test_a_mistake_in_a_cell_is_reported_once_in_a_line(tmp_path: Path, network: Path) -> None:
    run = planned(tmp_path / "run", network, methods=("source", "bn_stats"))
    network.write_text(
        NETWORK.replace("def tiny():", 'def tiny():\n    raise ValueError("no such weights\\nat all")\n')
    )
    failed = execute(run, SerialExecutor())
    assert [outcome.error for outcome in failed] == ["ValueError: no such weights"] * 2


#: Shells ignore Ctrl-C for what they start in the background, and Python inherits that.
COMMAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from ctta.cli import main; main()"


def bench(folder: Path, network: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-c", COMMAND, "bench", "embedded", "--out", str(folder)),
        *("--model", f"file:{network}:tiny", "--limit", "8", "--batch-size", "4", "--set", "cotta.views=1"),
        *("--methods", ",".join(METHODS), "--seeds", "1,2", "--threads", "1", "--save-every", "0", *more),
    ]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_killed_at_random_moments_a_run_ends_with_the_identical_table(
    tmp_path: Path, network: Path, expected: dict[str, list[BatchRecord]], workers: str
) -> None:
    run = planned(tmp_path / "run", network)
    generator = random.Random(int(workers))
    num_kills = 0
    while done(run) < run.num_batches:
        process = subprocess.Popen(bench(run.folder, network, "--workers", workers), stderr=subprocess.PIPE)
        aim = done(run) + generator.randrange(1, 25)
        while process.poll() is None and done(run) < aim:
            time.sleep(0.01)
        time.sleep(generator.random() * 0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            num_kills += 1
        assert process.communicate()[1] == b""
    assert num_kills >= 3
    assert outcome(run) == expected


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ctrl_c_leaves_a_run_that_can_be_gone_on_with(
    tmp_path: Path, network: Path, expected: dict[str, list[BatchRecord]], workers: str
) -> None:
    """As a terminal sends it: to the process and all its children. In this process nothing done is lost."""
    run = planned(tmp_path / "run", network)
    command = bench(run.folder, network, "--workers", workers, "--save-every", "1e9")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and done(run) < 10:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    message = process.communicate()[1]
    assert process.returncode == 130
    assert message == "Stopped. Run the same command again to resume.\n"
    if workers == "0":
        begun = [Path(cell.folder) for cell in run.cells if Path(cell.folder).exists() and not cell.is_complete]
        (state,) = begun[0].glob("state-*.safetensors")
        lines = (begun[0] / "batches.jsonl").read_text().count("\n")
        assert state.name == f"state-{lines}.safetensors"
    subprocess.run(command, check=True, capture_output=True)
    assert outcome(run) == expected


@pytest.fixture(scope="module")
def home_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray writes a token into the home folder, and looks for it there as long as the process lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        yield


@pytest.mark.usefixtures("home_elsewhere")
def test_a_cell_that_fits_on_no_node_is_refused_instead_of_waiting_for_ever() -> None:
    with pytest.raises(ValueError, match="use fewer threads"):
        RayExecutor(None, threads=1000)


@pytest.mark.usefixtures("home_elsewhere")
def test_a_ray_cluster_gives_the_same_results_and_survives_dying_cells(
    tmp_path: Path, network: Path, expected: dict[str, list[BatchRecord]]
) -> None:
    run = planned(tmp_path / "run", network)
    assert execute(run, RayExecutor(None, threads=1)) == []
    assert outcome(run) == expected
    outcomes: list[JobOutcome] = []
    deadly = planned(tmp_path / "deadly", network, "deadly", methods=("source",))
    (tmp_path / "lives").write_text("1")
    assert execute(deadly, RayExecutor(None, threads=1), on_outcome=outcomes.append) == []
    assert [outcome.will_retry for outcome in outcomes] == [True, False]


def test_threads_are_what_was_asked(tmp_path: Path, network: Path) -> None:
    before = torch.get_num_threads()
    run = planned(tmp_path / "run", network, methods=("source",), threads=2)
    try:
        execute(run, SerialExecutor())
    finally:
        torch.set_num_threads(before)
    assert read_result(Path(run.cells[0].folder)).environment["threads"] == 2
