"""Write docs/results/all-methods: error and time of every method on the embedded benchmark, from the cells of a run.

    ctta bench embedded --methods all --threads 1 --out runs/embedded
    python benchmarks/all_methods.py runs/embedded

Error is the mean over the corruptions. Time is measured here, on the first batches of the stream, as time of one core:
unlike the time in the run's reports it hardly depends on what else the machine does.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot

from ctta.benchmark import BenchmarkOptions, build_task
from ctta.evaluation import Result, read_result
from ctta.methods import METHODS
from ctta.registry import list_methods, resolve_method

matplotlib.use("Agg")

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "all-methods"
START, END = "<!-- table -->", "<!-- end of table -->"


def read_rows(cells: Path) -> dict[str, list[Result]]:
    """Return the complete results of each method, by its name, those of the first seeds first."""
    rows: dict[str, list[Result]] = {}
    for about in cells.glob("*/about.json"):
        result = read_result(about.parent)
        if result.is_complete:
            rows.setdefault(result.labels["row"], []).append(result)
    return {name: sorted(results, key=lambda each: each.labels["seed"] or 0) for name, results in rows.items()}


def measure_milliseconds(name: str) -> float:
    """Return the time of one core per image, the median of three batches after a first one."""
    task = build_task("embedded", BenchmarkOptions())
    model, stream = task.methods[name].build_model(task.make_network(), seed=1), task.make_stream(None)
    rows = slice(20 if name == "memo" else None)  # MEMO adapts to each image by itself, 32 views of it
    per_image = []
    for number in range(4):
        x = stream.read_batch(number).x[rows]
        started = time.process_time()
        model(x)
        per_image.append(1000 * (time.process_time() - started) / len(x))
    return median(per_image[1:])


def summarize(name: str, results: list[Result], milliseconds: float) -> dict[str, Any]:
    """Return the numbers of a method."""
    errors = [100 * result.error for result in results]
    by_domain = {
        domain: round(100 * mean(result.errors[number] for result in results), 2)
        for number, domain in enumerate(results[0].domains)
    }
    info = resolve_method(name).info if name in list_methods() else None
    settings = results[0].settings
    trains_norms = info is None or settings.get("trains") == "'norms'" or settings.get("skip_top") == "False"
    return {
        "title": results[0].method,
        "trains": info.trains if info and not trains_norms else "norm layers",
        "seeds": [result.labels["seed"] for result in results],
        "error": round(mean(errors), 2),
        "deviation": round(stdev(errors), 2) if len(errors) > 1 else None,
        "error_by_seed": [round(error, 2) for error in errors],
        "error_by_corruption": by_domain,
        "calibration_error": round(100 * mean(result.calibration_error for result in results), 2),
        "milliseconds_per_image": round(milliseconds, 2),
        "num_skipped": sum(batch.skipped for result in results for batch in result.batches),
        "settings": results[0].settings,
        "ctta": results[0].environment.get("ctta"),
    }


def format_table(numbers: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table, the lowest error first."""
    lines = [
        "| method | name | trains | seeds | error % | worst corruption, error % | ECE % | core ms per image |",
        "|---|---|---|---:|---:|---|---:|---:|",
    ]
    for name, row in sorted(numbers.items(), key=lambda item: item[1]["error"]):
        worst = max(row["error_by_corruption"], key=row["error_by_corruption"].get)
        seeds = "" if row["seeds"] == [None] else str(len(row["seeds"]))
        deviation = "" if row["deviation"] is None else f" ± {row['deviation']:.2f}"
        harm = f"{worst.rsplit(' ', 1)[0].replace('_', ' ')} {row['error_by_corruption'][worst]:.1f}"
        lines.append(
            f"| {row['title'].replace('*', chr(92) + '*')} | `{name}` | {row['trains']} | {seeds} | "
            f"{row['error']:.2f}{deviation} | {harm} | {row['calibration_error']:.1f} | "
            f"{row['milliseconds_per_image']:.1f} |"
        )
    if missing := [f"`{name}`" for name in METHODS if name not in numbers]:
        lines += ["", f"Not measured on this stream: {', '.join(missing)}."]
    return "\n".join(lines)


def plot(numbers: dict[str, dict[str, Any]], path: Path) -> None:
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
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the README.md that the table goes into")
    parser.add_argument("--measure", action="store_true", help="measure the times again")
    arguments = parser.parse_args()
    rows = read_rows(arguments.run / "cells")
    if len({(result.stream_hash, result.source) for results in rows.values() for result in results}) != 1:
        raise SystemExit("the results are of different streams or networks")
    torch.set_num_threads(1)
    page, file = arguments.out / "README.md", arguments.out / "numbers.json"
    known = json.loads(file.read_text()) if file.exists() and not arguments.measure else {}
    numbers = {}
    for name, results in rows.items():
        earlier = known.get(name, {}).get("milliseconds_per_image")
        numbers[name] = summarize(name, results, earlier or measure_milliseconds(name))
    numbers = dict(sorted(numbers.items(), key=lambda item: item[1]["error"]))
    file.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")
    plot(numbers, arguments.out / "error-and-time.png")
    before, _, rest = page.read_text().partition(START)
    page.write_text(f"{before}{START}\n{format_table(numbers)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
