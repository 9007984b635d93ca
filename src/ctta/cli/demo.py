"""``ctta demo``: a first benchmark, with a network and images that come with the library."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch

from ctta import benchmark
from ctta.benchmark.recipes.images import DEMO_METHODS, METHODS
from ctta.benchmark.report import write_report
from ctta.benchmark.report.content import ReportContent, SectionContent, read_numbers
from ctta.cli.bench import exit_on_failures, print_failure, print_results
from ctta.cli.console import exit_on_interrupt, print_rows, print_text, progress_bar
from ctta.cli.options import command
from ctta.core.options import Amp, Device, Option, Precision
from ctta.core.validation import check_choice
from ctta.errors import ConfigError

#: Recipe, methods and options by the name of the run folder.
SHORT: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {"demo": ("demo", DEMO_METHODS, {})}
FULL: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "full": ("embedded", (*METHODS[:-1], "cotta_fast", "cotta"), {}),
    "twenty-rounds": ("embedded", DEMO_METHODS, {"rounds": 20, "limit": 200, "batch_size": 50}),
}
#: The demos.
TASKS = ("classification", "detection")


@command
def demo(
    full: Annotated[
        bool, Option("Run 2,000 images per corruption in the paper's batches, and twenty rounds (over an hour).")
    ] = False,
    task: Annotated[str, Option("Run the demo of classification, or of detection on drawn streets.", "TASK")] = TASKS[
        0
    ],
    folder: Annotated[Path, Option("Write the runs and the report to this folder.", "DIR", "--out")] = Path(
        "runs/demo"
    ),
    device: Device = "cpu",
    amp: Amp = None,
) -> None:
    """Compare a few methods on fifteen corruptions, with a small network that comes with the library.

    After Ctrl-C, run the same command again to resume. With ``--task detection`` a small detector of cars and people
    drives by day, at night, and by day again; that takes minutes, and needs the extra ``detect``.
    """
    check_choice("task", task, TASKS)
    if task == "detection":
        if full:
            raise ConfigError("the demo of detection has one length: leave out --full")
        demonstrate_detection(folder / "detection", device, amp)
        return
    print_text("A ResNet-20 trained on clean CIFAR-10 images sees 15 corruptions, one after the other.\n")
    results = []
    for name, (recipe, methods, options) in (FULL if full else SHORT).items():
        with exit_on_interrupt(), progress_bar(name) as update:
            result = benchmark.run(
                recipe,
                methods=methods[::-1],  # the slowest first, so that no core idles at the end
                seeds=[1],
                **options,
                device=device,
                amp=amp,
                folder=folder / name,
                workers=torch.get_num_threads(),
                threads=1,  # two small cells side by side are faster than one on two cores
                report=False,
                command=shlex.join(["ctta", *sys.argv[1:]]),
                on_progress=update,
                on_outcome=print_failure,
            )
        print_results(result)
        results.append(result)
    if any(result.results for result in results):
        folders, out = [result.run.folder for result in results], folder / ("report-full" if full else "report")
        with exit_on_interrupt(), progress_bar("reading") as update:
            page = write_report(folders, out, on_progress=update)
        if not full and not results[0].failures:
            print_text(f"\n{describe_demo(read_numbers(out / 'numbers.json', ReportContent).sections[0])}\n")
        print_text(f"Report: {page}")
    exit_on_failures(results)


def demonstrate_detection(folder: Path, device: str = "cpu", amp: Precision | None = None) -> None:
    """Let the small detector adapt to day, night and day, and write its scores, a plot and images to a folder."""
    from ctta.benchmark.detection import DETECTION_DEMO_METHODS, run_street_detection
    from ctta.detection import DEFAULT_DETECTION_METHOD

    print_text("A small detector, trained on drawn streets by day, sees day, night and day again: mAP50 in percent.\n")
    with exit_on_interrupt(), progress_bar("detection") as update:
        result = run_street_detection(device=device, amp=amp, on_progress=update)
    header, *rows = result.tabulate()
    print_rows(header, rows, keep=header[0])
    folder.mkdir(parents=True, exist_ok=True)
    result.draw(folder / "images.png", (DETECTION_DEMO_METHODS[0], DEFAULT_DETECTION_METHOD))
    result.plot(folder / "scores.svg")
    print_text(f"Source beside {DEFAULT_DETECTION_METHOD}: {folder / 'images.png'}. Over time: {folder / 'scores.svg'}")


def describe_demo(section: SectionContent) -> str:
    """Return what a newcomer should take from the demo, in three sentences about its numbers."""
    errors = {row.label: row.cells[-1].value for row in section.scores.rows}
    settings = {row.label: row.settings for row in section.rows}
    source, statistics = errors["Source"], errors["BN Stats Adapt"]
    learned = [label for label in errors if label not in ("Source", "BN Stats Adapt")]
    *others, last = (f"{_describe_method(label, settings[label])} {errors[label]:.1f} %" for label in learned)
    is_lower = all(errors[label] < statistics for label in learned)
    decay, num_steps = float(settings["CoTTA"]["decay"]), section.rows[0].results[0].num_batches
    return (
        f"Without adaptation {source:.1f} % of the predictions are wrong; normalizing each batch by its own statistics,"
        f" which trains nothing, leaves {statistics:.1f} %. "
        f"Methods that learn from the unlabeled images {'do better still' if is_lower else 'do not all do better'}: "
        f"{', '.join(others)} and {last}. "
        f"After {num_steps} steps the teacher of CoTTA is still {100 * decay**num_steps:.0f} % the source network, so "
        "its rows show mostly what averaging views of an image does; what learning brings, and whether it lasts, takes "
        "longer streams."
    )


def _describe_method(label: str, settings: dict[str, str]) -> str:
    views = re.search(r"num_views=(\d+)", settings.get("views", ""))
    return f"{label}, which averages {views[1]} views of each image," if views else label
