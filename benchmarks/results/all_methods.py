"""Write docs/results/all-methods: error and time of every method on the embedded benchmark, from the cells of runs.

    ctta bench embedded --methods all --threads 1 --out runs/embedded
    ctta bench embedded --methods memo --limit 200 --seeds 1 --threads 1 --out runs/memo
    python -m benchmarks.results.all_methods runs/embedded runs/memo

Results join those that numbers.json already has: new methods, and further seeds of known ones. A seed counts once,
however often the script runs. Error is the mean over the corruptions. Time is measured here, on the first batches of
the stream, as time of one core: unlike the time in the run's reports it hardly depends on what else the machine does.
``--peaks tent cotta`` measures peak memory, of a process of its own for each method, on the same batches.
"""

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import matplotlib
import torch
from matplotlib import pyplot

from benchmarks.results.method_numbers import MergeError, Row, add_errors, add_results
from ctta.benchmark import BenchmarkOptions, build_task
from ctta.benchmark.recipes.base import add_methods
from ctta.benchmark.report.runs import read_run_file
from ctta.core.model import AdaptiveModel
from ctta.evaluation import Result, read_result
from ctta.evaluation.steps import PeakMemory
from ctta.methods import METHODS
from ctta.nn.surgery import fingerprint

matplotlib.use("Agg")

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "all-methods"
#: Errors of CoTTA with 32 views and of CoTTA.fast with 8 by seed, on the same stream; see error_by_views.py.
VIEWS = RESULTS.parent / "views" / "errors.json"
NOT_MEASURED = "not measured"
START, END = "<!-- table -->", "<!-- end of table -->"


def read_run(folder: Path) -> tuple[list[Result], int | None]:
    """Return the complete results of a run folder, and the number of images of each corruption; None for all.

    Raises:
        MergeError: The run is of another recipe, stream or network, or has other options.
    """
    run = read_run_file(folder)
    limit = run["options"]["limit"]
    options = BenchmarkOptions(limit=limit)
    # As JSON has them; a run of an earlier version lacks the later options.
    changed = {
        name: value for name, value in run["options"].items() if value != json.loads(json.dumps(vars(options)[name]))
    }
    if run["recipe"] != "embedded" or changed:
        raise MergeError(f"{folder} is a run of {run['recipe']} with the options {changed}: expected none but limit")
    task = build_task("embedded", options)
    expected = task.make_stream(None).hash, fingerprint(task.make_network())
    results = []
    for about in sorted(folder.glob("cells/*/about.json")):
        result = read_result(about.parent)
        if (result.stream_hash, result.source) != expected:
            raise MergeError(
                f"{about.parent} has the stream and network {result.stream_hash}, {result.source}: "
                f"expected {', '.join(expected)}"
            )
        if result.is_complete:
            results.append(result)
    return results, limit


def measure_milliseconds(name: str) -> float:
    """Return the time of one core per image, the median of three batches after a first one."""
    per_image = []
    model, batches = build_model(name)
    for x in batches:
        started = time.process_time()
        model(x)
        per_image.append(1000 * (time.process_time() - started) / len(x))
    return median(per_image[1:])


def measure_peak_mib(name: str) -> int | None:
    """Return the peak memory of this process on the first batches; of a new process, it is that of the method."""
    torch.set_num_threads(1)
    model, batches = build_model(name)
    memory = PeakMemory(torch.device("cpu"))
    for x in batches:
        model(x)
    return memory.read_mib()


def build_model(name: str) -> tuple[AdaptiveModel, Iterator[torch.Tensor]]:
    """Return a method with its settings of the benchmark, and the first four batches of the stream."""
    task = build_task("embedded", BenchmarkOptions())
    spec = add_methods(task.methods, [name])[name]
    stream = task.make_stream(None)
    rows = slice(20 if name == "memo" else None)  # MEMO adapts to each image by itself, 32 views of it
    batches = (stream.read_batch(number).x[rows] for number in range(4))
    return spec.build_model(task.make_network(), seed=1), batches


def format_table(numbers: dict[str, Row]) -> str:
    """Return a Markdown table, the lowest error first."""
    lines = [
        "| method | name | trains | seeds | error % | worst seed, error % | worst corruption, error % | ECE % | "
        "core ms per image | peak MiB | learned from, % of batches |",
        "|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for name, row in sorted(numbers.items(), key=lambda item: item[1]["error"]):
        worst = max(row["error_by_corruption"], key=row["error_by_corruption"].get)
        seeds = "" if row["seeds"] == [None] else str(len(row["seeds"]))
        deviation = "" if row["deviation"] is None else f" ± {row['deviation']:.2f}"
        harm = f"{worst.rsplit(' ', 1)[0].replace('_', ' ')} {row['error_by_corruption'][worst]:.1f}"
        title = row["title"].replace("*", chr(92) + "*") + (f" ({row['limit']} images)" if "limit" in row else "")
        worst_seed = "" if row["deviation"] is None else f"{max(row['error_by_seed']):.2f}"
        share = f"{100 * row['update_share']:.0f}" if "update_share" in row else NOT_MEASURED
        lines.append(
            f"| {title} | `{name}` | {row['trains']} | {seeds} | "
            f"{row['error']:.2f}{deviation} | {worst_seed} | {harm} | {row['calibration_error']:.1f} | "
            f"{row['milliseconds_per_image']:.1f} | {row.get('peak_mib', NOT_MEASURED)} | {share} |"
        )
    if limited := {name: row["limit"] for name, row in numbers.items() if "limit" in row}:
        samples = [f"`{name}` on the first {limit} images of each corruption" for name, limit in limited.items()]
        lines += ["", f"Measured on a part of the stream: {', '.join(samples)}."]
    if missing := [f"`{name}`" for name in METHODS if name not in numbers]:
        lines += ["", f"Not measured on this stream: {', '.join(missing)}."]
    return "\n".join(lines)


def plot(numbers: dict[str, Row], path: Path) -> None:
    """Draw error and time of each method, the lowest error on top."""
    rows = sorted(numbers.values(), key=lambda row: -row["error"])
    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(9, 0.24 * len(rows) + 1), layout="constrained", width_ratios=[3, 2]
    )
    titles = [row["title"] for row in rows]
    left.barh(titles, [row["error"] for row in rows], xerr=[row["deviation"] or 0 for row in rows], color="#4c78a8")
    right.barh(titles, [row["milliseconds_per_image"] for row in rows], color="#b0b0b0")
    left.set(xlabel="error (%)")
    right.set(xlabel="time of a core per image (ms)", xscale="log")
    left.tick_params(axis="y", labelsize=8)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Write numbers.json, error-and-time.png and the table in README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="run folders")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the README.md that the table goes into")
    parser.add_argument("--measure", action="store_true", help="measure the times again")
    parser.add_argument("--peaks", nargs="*", default=(), metavar="METHOD", help="measure the peak memory of these")
    arguments = parser.parse_args()
    page, file = arguments.out / "README.md", arguments.out / "numbers.json"
    numbers: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    views = json.loads(VIEWS.read_text())
    try:
        for folder in arguments.runs:
            results, limit = read_run(folder)
            numbers = add_results(numbers, results, limit=limit)
        for name, num_views in (("cotta", "32"), ("cotta_fast", "8")):
            if name in numbers:
                numbers[name] = add_errors(name, numbers[name], dict(enumerate(views[name][num_views], 1)))
    except MergeError as error:
        raise SystemExit(str(error)) from error
    torch.set_num_threads(1)
    for name, row in numbers.items():
        if arguments.measure or "milliseconds_per_image" not in row:
            row["milliseconds_per_image"] = round(measure_milliseconds(name), 2)
    for name in arguments.peaks:
        # A process for each: memory that an earlier method freed can stay with the process.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
            numbers[name]["peak_mib"] = executor.submit(measure_peak_mib, name).result()
    numbers = dict(sorted(numbers.items(), key=lambda item: item[1]["error"]))
    file.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")
    plot(numbers, arguments.out / "error-and-time.png")
    before, _, rest = page.read_text().partition(START)
    page.write_text(f"{before}{START}\n{format_table(numbers)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
