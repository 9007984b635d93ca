"""Benchmarks of seconds for tests: a tiny network in a file, and the results that every executor must give."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ctta.benchmark import BenchmarkOptions, BenchmarkRun, plan
from ctta.benchmark.executors import ProgressCounter
from ctta.evaluation import BatchRecord, read_result

#: Networks that any process can load; `deadly` kills its process as often as the file `lives` says.
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

#: Results of a run without what differs from run to run, by the names of its cells.
Records = dict[str, list[BatchRecord]]


def write_network(folder: Path) -> Path:
    path = folder / "network.py"
    path.write_text(NETWORK)
    return path


def plan_run(
    folder: Path,
    network: Path,
    function: str = "tiny",
    *,
    methods: Sequence[str] = METHODS,
    orders: Sequence[int | None] | None = None,
    seeds: Sequence[int] = (1, 2),
    threads: int = 1,
    command: str = "",
) -> BenchmarkRun:
    options = BenchmarkOptions(model=f"file:{network}:{function}", limit=8, batch_size=4, settings=("cotta.views=1",))
    return plan(
        folder,
        "embedded",
        options,
        methods=methods,
        orders=orders,
        seeds=seeds,
        threads=threads,
        save_every=0.0,
        command=command,
    )


def count_batches(run: BenchmarkRun) -> int:
    return ProgressCounter(run).count()


def read_records(run: BenchmarkRun) -> Records:
    """Return the records of all cells, which must be complete, without time and memory."""
    results = {cell.name: read_result(Path(cell.folder)) for cell in run.cells}
    assert all(result.is_complete for result in results.values())
    return {
        name: [replace(batch, seconds=0.0, peak_mib=0) for batch in result.batches] for name, result in results.items()
    }
