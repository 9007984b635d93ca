"""Measure the results of docs/results from scratch, and write their numbers, pictures, pages and tables.

    python -m benchmarks.results.run --list                             what there is, its command and its cost
    python -m benchmarks.results.run --only demo,full --cifar FOLDER    measure some of it (`make results`: everything)
    python -m benchmarks.results.run --only full --cifar FOLDER --workers 2

Killed at any moment, the same command continues; runs are kept below runs/results. FOLDER is the archive of CIFAR-10 as
extracted, which `ctta data get cifar10` prints. Costs are hours of one core that does nothing else.
"""

import argparse
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.results.pages import RESULTS, fill_pages, write_page
from benchmarks.results.planned import PLANNED, PlannedResult
from ctta.benchmark.report.content import build_content, format_numbers
from ctta.benchmark.report.runs import read_runs

RUNS = Path("runs/results")


def complete_command(command: str, folder: Path, cifar: Path | None, workers: int) -> list[str]:
    """Return a command to execute: with its folders, and with processes for the cells."""
    words = [str(folder) if word == "RUN" else str(cifar) if word == "CIFAR" else word for word in shlex.split(command)]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    options = ["--out", str(folder)]
    if words[1] == "bench" and workers:
        options += ["--workers", str(workers)]
    return [sys.executable, "-m", "ctta", *words[1:], *options]


def write_numbers(name: str, measurement: PlannedResult, run: Path) -> None:
    """Write numbers.json of a result from its run, with the command as a user would type it."""
    content = build_content(read_runs([run]))
    origin = replace(content.runs[0], commands=measurement.commands)
    (RESULTS / name).mkdir(exist_ok=True)
    text = format_numbers(replace(content, runs=(origin,)))
    (RESULTS / name / "numbers.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Measure what is asked for, and write its pages and all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print names, costs and commands, and measure nothing")
    parser.add_argument("--only", help="names of results, separated by commas; default: all")
    parser.add_argument("--cifar", type=Path, help="folder with test_batch of CIFAR-10")
    parser.add_argument("--workers", type=int, default=2, help="number of cells at a time")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(PLANNED)
    if unknown := [name for name in names if name not in PLANNED]:
        parser.error(f"there is no result {', '.join(unknown)}; expected some of {', '.join(PLANNED)}")
    if arguments.list:
        for name in names:
            measurement = PLANNED[name]
            print(f"{name} ({measurement.core_hours:g} core hours): {measurement.about}")
            print("\n".join(f"    {command}" for command in measurement.commands))
        return
    if arguments.cifar is None and (needing := [name for name in names if PLANNED[name].needs_cifar]):
        parser.error(f"{', '.join(needing)} needs --cifar FOLDER; `ctta data get cifar10` downloads it and prints it")
    for name in names:
        measurement, folder = PLANNED[name], RUNS / name
        for command in measurement.commands:
            words = complete_command(command, folder, arguments.cifar, arguments.workers)
            subprocess.run(words, check=True)
        if measurement.run is not None:
            write_numbers(name, measurement, folder / measurement.run)
            write_page(name, RESULTS / name)
    fill_pages()


if __name__ == "__main__":
    main()
