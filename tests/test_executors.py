"""Every executor gives the same results, whichever process dies."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmark_runs import METHODS, NETWORK, Records, count_batches, plan_run, read_records, write_network

from ctta.benchmark import BenchmarkCell, JobOutcome, ProcessExecutor, RayExecutor, SerialExecutor, execute
from ctta.errors import ConfigError
from ctta.evaluation import read_result


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return write_network(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = tmp_path_factory.mktemp("expected")
    run = plan_run(folder / "run", write_network(folder))
    assert execute(run, SerialExecutor()) == []
    return read_records(run)


def test_cell_survives_json(tmp_path: Path, network: Path) -> None:
    for cell in plan_run(tmp_path / "run", network, orders=(None, 3)).cells:
        assert BenchmarkCell.from_json(cell.to_json()) == cell


def test_processes_give_the_same_results(tmp_path: Path, network: Path, expected: Records) -> None:
    run = plan_run(tmp_path / "run", network)
    assert execute(run, ProcessExecutor(2)) == []
    assert read_records(run) == expected


def test_output_of_a_network_does_not_disturb_the_report_of_its_worker(
    tmp_path: Path, network: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    network.write_text(
        NETWORK.replace("def tiny():", 'def tiny():\n    print("loading", input)\n    os.system("echo x")\n')
    )
    run = plan_run(tmp_path / "run", network, methods=("source",))
    capfd.readouterr()
    assert execute(run, ProcessExecutor(1)) == []
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "x"


def test_cell_whose_process_dies_is_retried_and_reported(tmp_path: Path, network: Path) -> None:
    run = plan_run(tmp_path / "run", network, "deadly", methods=("source", "bn_stats"))
    (tmp_path / "lives").write_text("2")
    outcomes: list[JobOutcome] = []
    assert execute(run, ProcessExecutor(1), on_outcome=outcomes.append) == []
    died = [outcome for outcome in outcomes if outcome.process_died]
    assert len(died) == 2
    assert all(outcome.will_retry and "exit code -9" in str(outcome.error) for outcome in died)
    read_records(run)


def test_cell_that_always_dies_is_given_up_and_the_others_continue(tmp_path: Path, network: Path) -> None:
    """The two cells die in turn, so that the first has used up its three attempts when the second survives."""
    run = plan_run(tmp_path / "run", network, "deadly", methods=("source", "bn_stats"))
    (tmp_path / "lives").write_text("5")
    (failure,) = execute(run, ProcessExecutor(1))
    assert failure.cell.method == "source"
    assert failure.process_died
    assert not failure.will_retry
    assert read_result(Path(run.cells[1].folder)).is_complete


@pytest.mark.parametrize("executor", [SerialExecutor(), ProcessExecutor(1)], ids=["serial", "process"])
def test_error_in_a_cell_is_reported_once_in_one_line(
    tmp_path: Path, network: Path, executor: SerialExecutor | ProcessExecutor
) -> None:
    run = plan_run(tmp_path / "run", network, methods=("source", "bn_stats"))
    network.write_text(
        NETWORK.replace("def tiny():", 'def tiny():\n    raise ValueError("no such weights\\nat all")\n')
    )
    failures = execute(run, executor)
    expected = f"ConfigError: {network} failed with ValueError: no such weights"
    assert [outcome.error for outcome in failures] == [expected] * 2


def test_cell_uses_the_requested_number_of_threads(tmp_path: Path, network: Path) -> None:
    before = torch.get_num_threads()
    run = plan_run(tmp_path / "run", network, methods=("source",), threads=2)
    execute(run, SerialExecutor())
    assert read_result(Path(run.cells[0].folder)).environment["threads"] == 2
    assert torch.get_num_threads() == before


#: Shells ignore Ctrl-C for what they start in the background, and Python inherits that.
COMMAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from ctta.cli import main; main()"


def bench(folder: Path, network: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-c", COMMAND, "bench", "embedded", "--out", str(folder)),
        *("--model", f"file:{network}:tiny", "--limit", "8", "--batch-size", "4", "--set", "cotta.views=1"),
        *("--methods", ",".join(METHODS), "--seeds", "1,2", "--threads", "1", "--save-every", "0", *more),
    ]


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.long)])
def test_run_killed_at_random_moments_ends_with_identical_results(
    tmp_path: Path, network: Path, expected: Records, workers: str
) -> None:
    run = plan_run(tmp_path / "run", network)
    generator = random.Random(int(workers))
    num_kills = 0
    while count_batches(run) < run.num_batches:
        process = subprocess.Popen(bench(run.folder, network, "--workers", workers), stderr=subprocess.PIPE)
        target = count_batches(run) + generator.randrange(5, 50)
        while process.poll() is None and count_batches(run) < target:
            time.sleep(0.01)
        time.sleep(generator.random() * 0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            num_kills += 1
        lines = process.communicate()[1].splitlines()  # a notice and, after ten seconds, lines of progress
        assert all(line.startswith((b"One run for all seeds", b"embedded: ")) for line in lines), lines
    assert num_kills >= 3
    assert read_records(run) == expected


KILLED_PARENT = """
import os, signal, sys
from pathlib import Path
from benchmark_runs import plan_run
from ctta.benchmark import ProcessExecutor

run = plan_run(Path(sys.argv[1]), Path(sys.argv[2]), methods=("source",))
executor = ProcessExecutor(1)
executor.submit(run.cells[0])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worker_whose_parent_is_killed_at_once_ends_silently(tmp_path: Path, network: Path) -> None:
    script = [sys.executable, "-c", KILLED_PARENT, str(tmp_path / "run"), str(network)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Waits for the end of standard error, which the worker inherits.
    ended = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr == ""
    assert not list((tmp_path / "run").glob("cells/*/batches.jsonl"))


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.long)])
def test_run_stopped_by_ctrl_c_can_be_resumed(tmp_path: Path, network: Path, expected: Records, workers: str) -> None:
    """A terminal sends the signal to the process and all its children. In one process no finished batch is lost."""
    run = plan_run(tmp_path / "run", network)
    command = bench(run.folder, network, "--workers", workers, "--save-every", "1e9")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and count_batches(run) < 10:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    message = process.communicate()[1]
    assert process.returncode == 130
    assert message.splitlines()[-1] == "Stopped. Run the same command again to resume."  # after progress, if slow
    if workers == "0":
        begun = [Path(cell.folder) for cell in run.cells if Path(cell.folder).exists() and not cell.is_complete]
        (state,) = begun[0].glob("state-*.safetensors")
        num_lines = (begun[0] / "batches.jsonl").read_text().count("\n")
        assert state.name == f"state-{num_lines}.safetensors"
    subprocess.run(command, check=True, capture_output=True)
    assert read_records(run) == expected


@pytest.fixture(scope="module")
def other_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray writes a token into the home folder, and looks for it there as long as the process lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        yield


@pytest.mark.usefixtures("other_home")
def test_ray_refuses_a_cell_that_fits_on_no_node() -> None:
    with pytest.raises(ConfigError):
        RayExecutor(None, threads=1000)


@pytest.mark.usefixtures("other_home")
def test_ray_gives_the_same_results_and_survives_dying_cells(tmp_path: Path, network: Path, expected: Records) -> None:
    run = plan_run(tmp_path / "run", network)
    assert execute(run, RayExecutor(None, threads=1)) == []
    assert read_records(run) == expected
    outcomes: list[JobOutcome] = []
    deadly = plan_run(tmp_path / "deadly", network, "deadly", methods=("source",))
    (tmp_path / "lives").write_text("1")
    assert execute(deadly, RayExecutor(None, threads=1), on_outcome=outcomes.append) == []
    assert [outcome.will_retry for outcome in outcomes] == [True, False]
