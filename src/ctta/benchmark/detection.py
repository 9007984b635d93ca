"""The benchmark of detectors: methods on drawn streets, or on labeled images that are corrupted."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctta.benchmark.plan import choose
from ctta.benchmark.recipes.base import MethodSpec, apply_changes
from ctta.benchmark.run import RunOptions
from ctta.core.options import Precision, refuse_options, takes_options
from ctta.core.validation import check_choice
from ctta.data.corruptions import CORRUPTIONS
from ctta.data.corruptions.registry import check_corruption
from ctta.detection import (
    DEFAULT_DETECTION_METHOD,
    DETECTION_METHODS,
    Boxes,
    corrupt_stream,
    detect,
    draw_street_batches,
    find_labeled_images,
    load_detector,
    street_detector,
)
from ctta.detection.boxes import move_boxes
from ctta.detection.datasets import LabeledBatch
from ctta.detection.drawing import draw_boxes
from ctta.errors import ConfigError
from ctta.evaluation.boxes import DetectionEstimate, DetectionRun, estimate_scores, run_detection
from ctta.io.atomic import atomic_write
from ctta.models import to_device
from ctta.nn.surgery import find_weight

#: The methods of ``ctta demo --task detection``.
DETECTION_DEMO_METHODS = ("source", "bn_stats", "shift_statistics", "cotta")
#: The name of the benchmark on the command line, where others have the name of a recipe.
DETECTION = "detection"
#: The methods of ``ctta bench detection`` unless the user names others.
DETECTION_BENCH_METHODS = ("source", "bn_stats", DEFAULT_DETECTION_METHOD)
#: Options of benchmarks that do not apply to detectors.
REFUSED = (
    *("orders", "batch_size", "protocol", "target", "speed", "num_images", "preset", "mean", "std", "seeds"),
    *("protocols", "policies", "source_stats", "download", "insecure", "report", "workers", "ray", "threads"),
)
#: By day, at night, and by day again.
DAY_NIGHT_DAY = ("clear", "night", "clear")


@dataclass(frozen=True)
class DetectionResult:
    """What methods found on one stream.

    Attributes:
        runs: The run of each method.
        milliseconds: The time per image of each method.
        images: The last image of each part, uint8 (H, W, 3), by its row in the runs.
    """

    runs: Mapping[str, DetectionRun]
    milliseconds: Mapping[str, float]
    images: Mapping[int, Any]

    def tabulate(self) -> list[tuple[str, ...]]:
        """Return a header and a row for each method: mAP50 on each part and on all, and the time per image."""
        parts = self.parts
        rows: list[tuple[str, ...]] = [("method", *parts, "all", "ms")]
        for name, run in self.runs.items():
            scores = [run.score(part).map50 for part in (*parts, None)]
            rows.append((name, *(f"{score:.1f}" for score in scores), f"{self.milliseconds[name]:.0f}"))
        return rows

    @property
    def parts(self) -> list[str]:
        """The parts of the stream, in their order."""
        return list(dict.fromkeys(next(iter(self.runs.values())).domains))

    def estimate(self) -> dict[str, dict[str, DetectionEstimate]]:
        """Return the estimates of each method over the parts that are not clean, and over those that are.

        Where all are of one kind, or the stream is drawn, they are those over all parts.
        """
        clean = [name for name in self.parts if name.split()[-1] == "clean"]
        shifted = [name for name in self.parts if name not in clean]
        kinds = {"shifted": shifted, "clean": clean} if clean and shifted else {"all": self.parts}
        return {kind: estimate_scores(self.runs, parts) for kind, parts in kinds.items()}

    def write(self, folder: Path, command: str) -> None:
        """Write ``scores.json``, ``scores.svg`` and ``images.png`` to a folder.

        Args:
            folder: The folder.
            command: How the run was started.
        """
        scores = {
            name: {"milliseconds": self.milliseconds[name], **{part: asdict(run.score(part)) for part in self.parts}}
            for name, run in self.runs.items()
        }
        estimates = {
            kind: {name: asdict(each) for name, each in found.items()} for kind, found in self.estimate().items()
        }
        content = {"command": command, "scores": scores, "estimates": estimates}
        with atomic_write(folder / "scores.json") as temporary:
            temporary.write_text(json.dumps(content, indent=1))
        self.plot(folder / "scores.svg")
        self.draw(folder / "images.png", [*self.runs][:3], scale=1)

    def draw(self, path: Path, methods: Sequence[str], *, scale: int = 2) -> None:
        """Write a PNG with the last image of each part: a row for each, a column for each of the methods.

        Args:
            path: The file.
            methods: Names of the runs.
            scale: How many times as large the images are.
        """
        from PIL import Image

        rows = [
            np.concatenate([draw_boxes(image, self.runs[name].found[row], scale=scale) for name in methods], 1)
            for row, image in self.images.items()
        ]
        with atomic_write(path) as temporary:
            Image.fromarray(np.concatenate(rows)).save(temporary, format="PNG")

    def plot(self, path: Path, *, window: int = 20) -> None:
        """Write an SVG of mAP50 over windows of the stream, one line for each method.

        Args:
            path: The file.
            window: Images in a window.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for name, run in self.runs.items():
            scores = run.score_windows(window)
            axes.plot([window * (number + 0.5) for number in range(len(scores))], scores, marker="o", label=name)
        domains = next(iter(self.runs.values())).domains
        starts = [row for row, name in enumerate(domains) if row == 0 or domains[row - 1] != name]
        for row in starts:
            axes.axvline(row, color="gray", linewidth=0.5)
            axes.text(row, 1.0, f" {domains[row]}", transform=axes.get_xaxis_transform(), va="bottom", color="gray")
        axes.set(xlabel="image", ylabel=f"mAP50 over {window} images", ylim=(0, 100))
        axes.legend(loc="lower left", frameon=False)
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format="svg")


def run_street_detection(
    methods: Sequence[str] | Mapping[str, tuple[str, Mapping[str, Any]]] = DETECTION_DEMO_METHODS,
    conditions: Sequence[str] = DAY_NIGHT_DAY,
    *,
    num_frames: int = 60,
    batch_size: int = 4,
    split: str = "report",
    seed: int = 0,
    device: str = "cpu",
    amp: Precision | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DetectionResult:
    """Let methods adapt the small detector to drawn streets, one part of the stream after the other.

    Args:
        methods: Names of :data:`ctta.detection.DETECTION_METHODS`, or such names with settings by the names of rows.
        conditions: The parts of the stream.
        num_frames: Frames of each part.
        batch_size: Frames in a batch.
        split: The scenes; settings are chosen on "choose" and reported on "report".
        seed: Seed of the scenes.
        device: Where the detector runs.
        amp: ``"bf16"`` or ``"fp16"`` to run it under ``torch.autocast``.
        on_progress: Called with the number of batches that are done, and of all.

    Returns:
        What each method found.

    Raises:
        ConfigError: There are no methods.
    """
    chosen = methods if isinstance(methods, Mapping) else {name: (name, {}) for name in methods}
    num_batches = len(conditions) * -(-num_frames // batch_size)
    stream = draw_street_batches(conditions, num_frames, batch_size=batch_size, split=split, seed=seed)
    progress = None if on_progress is None else (lambda done: on_progress(done, num_batches))
    return compare_detectors(street_detector(), chosen, stream, device=device, amp=amp, on_batch=progress)


def compare_detectors(
    detector: nn.Module,
    methods: Mapping[str, tuple[str, Mapping[str, Any]]],
    batches: Iterable[LabeledBatch],
    *,
    device: str = "cpu",
    amp: Precision | None = None,
    on_batch: Callable[[int], object] | None = None,
) -> DetectionResult:
    """Let methods adapt a detector to one stream, and score and time them.

    Args:
        detector: The detector.
        methods: Names of :data:`ctta.detection.DETECTION_METHODS` with settings, by the names of rows.
        batches: The stream.
        device: Where the detector runs.
        amp: ``"bf16"`` or ``"fp16"`` to run it under ``torch.autocast``.
        on_batch: Called with the number of batches that are done.

    Returns:
        What each method found.

    Raises:
        ConfigError: There are no methods.
    """
    if not methods:
        raise ConfigError("expected at least one method")
    detector, seconds = to_device(detector, device), dict.fromkeys(methods, 0.0)
    images, num_images = dict[str, tuple[int, Any]](), 0

    def timed(name: str) -> Callable[[Tensor], Sequence[Boxes]]:
        method, settings = methods[name]
        model = detect(detector, method, **{"amp": amp, **settings})

        def call(x: Tensor) -> Sequence[Boxes]:
            start = time.perf_counter()
            x = x.to(find_weight(model).device, non_blocking=True)
            found = move_boxes(model(x), torch.device("cpu"))  # which waits until an accelerator is done
            seconds[name] += time.perf_counter() - start
            return found

        return call

    def watched() -> Iterator[LabeledBatch]:
        nonlocal num_images
        for number, (x, targets, part) in enumerate(batches):
            num_images += len(x)
            images[part] = num_images - 1, (255 * x[-1]).round().byte().permute(1, 2, 0).cpu().numpy()
            yield x, targets, part
            if on_batch is not None:
                on_batch(number + 1)

    runs = run_detection({name: timed(name) for name in methods}, watched())
    milliseconds = {name: 1000 * each / max(1, num_images) for name, each in seconds.items()}
    return DetectionResult(runs, milliseconds, dict(images.values()))


@takes_options(RunOptions)
def run_detection_benchmark(options: RunOptions) -> DetectionResult:
    """Methods for detectors, one corruption after the other, scored by mean average precision.

    Without ``data`` the stream are drawn streets by day, at night and by day again. The result is one JSON file with
    every score, a plot over time and the last image of each part, in the folder of the run.

    Args:
        options: The keywords; ``model`` as :func:`ctta.detection.load_detector` takes it, and ``data`` as
            :func:`ctta.detection.find_labeled_images` does.

    Returns:
        What each method found.

    Raises:
        ConfigError: An argument does not fit.
        DataError: The data have no known layout.
    """
    refuse_options(options, REFUSED, "ctta bench detection", "leave it out")
    names = choose("methods", options.methods, DETECTION_BENCH_METHODS)
    for name in names:
        check_choice("methods", name, tuple(DETECTION_METHODS))
    specs = {name: MethodSpec(name, DETECTION_METHODS[name]) for name in names}
    specs = apply_changes(specs, tuple(options.for_recipe.settings))
    methods = {name: (name, spec.settings) for name, spec in specs.items()}
    detector = load_detector(options.model or "streets")
    batches: Iterable[LabeledBatch]
    if options.data is None:
        parts = options.corruptions or DAY_NIGHT_DAY
        batches = draw_street_batches(tuple(parts) * (options.rounds or 1), options.limit or 60)
    else:
        read = find_labeled_images(options.data, options.classes, size=options.size, limit=options.limit)
        parts = ["clean" if name == "none" else name for name in options.corruptions or (*CORRUPTIONS, "none")]
        severity = 5 if options.severity is None else options.severity
        for name in parts:
            if name != "clean":
                check_corruption(name, severity)
        batches = corrupt_stream(read, parts, severity=severity, rounds=options.rounds or 1)
    progress = None if options.on_progress is None else partial(_report_progress, options.on_progress)
    result = compare_detectors(detector, methods, batches, device=options.device, amp=options.amp, on_batch=progress)
    folder = Path(options.folder or Path("runs") / DETECTION)
    folder.mkdir(parents=True, exist_ok=True)
    result.write(folder, options.command or "")
    return result


def _report_progress(on_progress: Callable[[int, int], None], done: int) -> None:
    on_progress(done, done)  # how many images there are is known when they have been read
