"""CoTTA's error against its number of views: the authors' independent ones, and those of `CoTTA.fast`.

    python benchmarks/error_by_views.py

The embedded benchmark, 15 corruptions x 2,000 images in batches of 200, three seeds. Hours on two cores; stopped, the
same command goes on. Writes docs/results/views/: errors.json and the curve.
"""

import json
from pathlib import Path
from statistics import mean, stdev

import matplotlib
from matplotlib import pyplot

import ctta.benchmark

matplotlib.use("Agg")

RUNS, RESULTS = Path("runs/views"), Path("docs/results/views")
SEEDS, WORKERS = (1, 2, 3), 2
LABELS = {"cotta": "the authors' views", "cotta_fast": "views of CoTTA.fast"}
POINTS = [("cotta", 32), ("cotta_fast", 8), ("cotta", 8)]


def errors(row: str, number: int) -> list[float]:
    """In percent, by seed."""
    outcome = ctta.benchmark.run(
        "embedded",
        methods=[row],
        seeds=SEEDS,
        settings={f"{row}.views": number},
        folder=RUNS / f"{row}-{number}",
        workers=WORKERS,
        threads=1,
        report=False,
    )
    if outcome.failures:
        raise RuntimeError(f"{outcome.failures[0].cell.name}: {outcome.failures[0].error}")
    return [round(100 * result.error, 2) for result in outcome.results]


def draw(found: dict[str, dict[int, list[float]]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for row, by_number in found.items():
        numbers = sorted(by_number)
        means = [mean(by_number[number]) for number in numbers]
        deviations = [stdev(by_number[number]) for number in numbers]
        axes.errorbar(numbers, means, deviations, marker="o", capsize=3, label=LABELS[row])
    axes.set_xscale("log", base=2)
    ticks = sorted({number for by_number in found.values() for number in by_number})
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.set(xlabel="views per step", ylabel="error (%)", title="CoTTA, 15 x 2,000 images, three seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=144)


def main() -> None:
    found: dict[str, dict[int, list[float]]] = {row: {} for row in LABELS}
    for row, number in POINTS:
        found[row][number] = errors(row, number)
        print(f"{LABELS[row]:22}{number:4} views  {mean(found[row][number]):6.2f} %  {found[row][number]}", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "errors.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, RESULTS / "error-by-views.png")


if __name__ == "__main__":
    main()
