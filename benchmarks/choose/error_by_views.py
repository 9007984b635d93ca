"""CoTTA's error by its number of views: independent ones as in the paper, and those of `CoTTA.fast`.

    python -m benchmarks.choose.error_by_views

The embedded benchmark, 15 corruptions x 2,000 images in batches of 200, three seeds. Takes hours on two cores; run the
same command again to resume. Writes errors.json and the plot to docs/results/views/.
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
LABELS = {"cotta": "independent views", "cotta_fast": "views of CoTTA.fast"}
POINTS = [("cotta", 32), ("cotta_fast", 8), ("cotta", 8)]


def measure_errors(method: str, num_views: int) -> list[float]:
    """Return the error in percent for every seed."""
    outcome = ctta.benchmark.run(
        "embedded",
        methods=[method],
        seeds=SEEDS,
        settings={f"{method}.views": num_views},
        folder=RUNS / f"{method}-{num_views}",
        workers=WORKERS,
        threads=1,
        report=False,
    )
    if outcome.failures:
        raise RuntimeError(f"{outcome.failures[0].cell.name}: {outcome.failures[0].error}")
    return [round(100 * result.error, 2) for result in outcome.results]


def plot(errors: dict[str, dict[int, list[float]]], path: Path) -> None:
    """Plot mean and standard deviation over seeds."""
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for method, by_number in errors.items():
        numbers = sorted(by_number)
        means = [mean(by_number[number]) for number in numbers]
        deviations = [stdev(by_number[number]) for number in numbers]
        axes.errorbar(numbers, means, deviations, marker="o", capsize=3, label=LABELS[method])
    axes.set_xscale("log", base=2)
    ticks = sorted({number for by_number in errors.values() for number in by_number})
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.set(xlabel="views per step", ylabel="error (%)", title="CoTTA, 15 x 2,000 images, three seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=144)


def main() -> None:
    """Measure all points, write them and plot them."""
    errors: dict[str, dict[int, list[float]]] = {method: {} for method in LABELS}
    for method, num_views in POINTS:
        measured = measure_errors(method, num_views)
        errors[method][num_views] = measured
        print(f"{LABELS[method]:22}{num_views:4} views  {mean(measured):6.2f} %  {measured}", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "errors.json").write_text(json.dumps(errors, indent=1) + "\n")
    plot(errors, RESULTS / "error-by-views.png")


if __name__ == "__main__":
    main()
