"""Label maps laid over their scenes: the truth, the network as trained, and after adapting."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ctta.datasets.base import IGNORE_INDEX
from ctta.evaluation.examples import SceneExample
from ctta.report.colors import FAINT
from ctta.report.layout import Layout
from ctta.report.palettes import palette_of
from ctta.report.svg import plot_style, printable, shortened

WIDTH = 10.0  # inches
STRENGTH = 0.7  # of the colours over the picture
CAPTION = (
    "The scenes of each method whose share of right pixels (in percent) rose and fell most, among the last segments of "
    "every domain. Black has no label, or no finite answer."
)


def overlays(examples: Sequence[SceneExample], layout: Layout) -> Figure:
    """One row for each example: the picture, and three maps over it."""
    shape = examples[0].image.shape
    panel_height = WIDTH / 4 * shape[0] / shape[1]
    with plot_style():
        figure = Figure(figsize=(WIDTH, 0.5 + (panel_height + 0.45) * len(examples)), layout="constrained")
        panels = figure.subplots(len(examples), 4, squeeze=False)
        for example, row in zip(examples, panels, strict=True):
            _draw(example, row, layout)
        _legend(figure, examples)
    return figure


def _draw(example: SceneExample, row: Sequence[Axes], layout: Layout) -> None:
    palette = _palette(example)
    method = printable(example.method)
    place = printable(layout.place_of(example.segment, example.domain))
    row[0].set_title(f"{shortened(method, 80)}, {example.kind} change: {place}", loc="left")
    pictures = {
        "picture": example.image,
        "truth": _over(example.image, example.truth, palette),
        f"Source, {100 * example.accuracy_before:.1f}": _over(example.image, example.before, palette),
        f"{shortened(method, 30)}, {100 * example.accuracy_after:.1f}": _over(example.image, example.after, palette),
    }
    for axes, (name, pixels) in zip(row, pictures.items(), strict=True):
        axes.imshow(pixels, interpolation="none")
        axes.set_xlabel(name, labelpad=3)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)


def _palette(example: SceneExample) -> NDArray[np.uint8]:
    if example.class_names:
        return palette_of(example.class_names, len(example.class_names))
    known = [
        classes[classes != IGNORE_INDEX].max(initial=0) for classes in (example.truth, example.before, example.after)
    ]
    return palette_of((), int(max(known)) + 1)


def _over(
    image: NDArray[np.uint8], classes: NDArray[np.unsignedinteger], palette: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Colours over a grey picture, so that only classes have colours; black where there is no class."""
    grey = image.astype(np.float32).mean(2, keepdims=True)
    has_class = classes < len(palette)
    colours = palette[np.where(has_class, classes, 0)]
    mixed = np.where(has_class[..., None], STRENGTH * colours + (1 - STRENGTH) * grey, 0)
    return mixed.round().astype(np.uint8)


def _legend(figure: Figure, examples: Sequence[SceneExample]) -> None:
    names = examples[0].class_names
    if names:
        patches = [
            Patch(facecolor=colour / 255, edgecolor=FAINT, linewidth=0.6, label=name)
            for name, colour in zip(names, _palette(examples[0]), strict=True)
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(names), 10), handlelength=1.2)
