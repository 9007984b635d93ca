"""The benchmark of detectors: the small detector on drawn streets, in a sequence of weather and light."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctta.core.options import Precision
from ctta.detection import Boxes, detect, draw_street_batches, street_detector
from ctta.detection.boxes import move_boxes
from ctta.detection.drawing import draw_boxes
from ctta.errors import ConfigError
from ctta.evaluation.boxes import DetectionRun, run_detection
from ctta.io.atomic import atomic_write
from ctta.models import to_device
from ctta.nn.surgery import find_weight

#: The methods of ``ctta demo --task detection``.
DETECTION_DEMO_METHODS = ("source", "bn_stats", "shift_statistics", "cotta")
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
        parts = list(dict.fromkeys(next(iter(self.runs.values())).domains))
        rows: list[tuple[str, ...]] = [("method", *parts, "all", "ms")]
        for name, run in self.runs.items():
            scores = [run.score(part).map50 for part in (*parts, None)]
            rows.append((name, *(f"{score:.1f}" for score in scores), f"{self.milliseconds[name]:.0f}"))
        return rows

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
    if not chosen:
        raise ConfigError("expected at least one method")
    detector, seconds = to_device(street_detector(), device), dict.fromkeys(chosen, 0.0)

    def timed(name: str) -> Callable[[Tensor], Sequence[Boxes]]:
        method, settings = chosen[name]
        model = detect(detector, method, **{"amp": amp, **settings})

        def call(x: Tensor) -> Sequence[Boxes]:
            start = time.perf_counter()
            images = x.to(find_weight(model).device, non_blocking=True)
            found = move_boxes(model(images), torch.device("cpu"))  # which waits until an accelerator is done
            seconds[name] += time.perf_counter() - start
            return found

        return call

    images: dict[int, Any] = {}
    num_batches = len(conditions) * -(-num_frames // batch_size)

    def batches() -> Any:
        stream = draw_street_batches(conditions, num_frames, batch_size=batch_size, split=split, seed=seed)
        num_images = 0
        for number, (x, targets, part) in enumerate(stream):
            num_images += len(x)
            if num_images % num_frames == 0:
                images[num_images - 1] = (255 * x[-1]).round().byte().permute(1, 2, 0).numpy()
            yield x, targets, part
            if on_progress is not None:
                on_progress(number + 1, num_batches)

    runs = run_detection({name: timed(name) for name in chosen}, batches())
    total = num_frames * len(conditions)
    return DetectionResult(runs, {name: 1000 * each / total for name, each in seconds.items()}, images)
