"""Label maps drawn over their scenes: the labels, the source network, and the adapted network."""

import colorsys
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ctta.benchmark.report.layout import ColumnLayout
from ctta.benchmark.report.theme import FAINT, plot_style, replace_control_characters, shorten
from ctta.data import streets as synthetic
from ctta.data.datasets.base import IGNORE_INDEX
from ctta.data.datasets.segmentation import CLASS_NAMES
from ctta.evaluation.examples import SceneExample

WIDTH = 10.0  # inches
OPACITY = 0.7  # of the colors over the image

#: The official colors of Cityscapes.
_CITYSCAPES_COLORS = (
    (128, 64, 128),
    (244, 35, 232),
    (70, 70, 70),
    (102, 102, 156),
    (190, 153, 153),
    (153, 153, 153),
    (250, 170, 30),
    (220, 220, 0),
    (107, 142, 35),
    (152, 251, 152),
    (70, 130, 180),
    (220, 20, 60),
    (255, 0, 0),
    (0, 0, 142),
    (0, 0, 70),
    (0, 60, 100),
    (0, 80, 100),
    (0, 0, 230),
    (119, 11, 32),
)
_GOLDEN_RATIO = 0.618034  # of a full turn between the hues of neighboring classes


def plot_overlays(examples: Sequence[SceneExample], layout: ColumnLayout) -> Figure:
    """Plot one row per example: the image, and three label maps over it."""
    height, width = examples[0].image.shape[:2]
    panel_height = WIDTH / 4 * height / width
    with plot_style():
        figure = Figure(figsize=(WIDTH, 0.5 + (panel_height + 0.45) * len(examples)), layout="constrained")
        panels = figure.subplots(len(examples), 4, squeeze=False)
        for example, row in zip(examples, panels, strict=True):
            _draw_example(example, row, layout)
        _draw_legend(figure, examples)
    return figure


def choose_palette(class_names: tuple[str, ...], num_classes: int) -> NDArray[np.uint8]:
    """Return RGB colors (num_classes, 3): those of the dataset if it has any, otherwise colors of different hue."""
    if class_names == synthetic.CLASSES:
        return synthetic.PALETTE
    if class_names == CLASS_NAMES:
        return np.array(_CITYSCAPES_COLORS, np.uint8)
    colors = [
        colorsys.hsv_to_rgb(number * _GOLDEN_RATIO % 1, 0.85 - 0.3 * (number % 2), 0.9 - 0.3 * (number % 3 == 2))
        for number in range(num_classes)
    ]
    return (255 * np.array(colors)).astype(np.uint8)


def _draw_example(example: SceneExample, row: Sequence[Axes], layout: ColumnLayout) -> None:
    palette = _choose_example_palette(example)
    method = replace_control_characters(example.method)
    segment = replace_control_characters(layout.name_segment(example.segment, example.domain))
    row[0].set_title(f"{shorten(method, 80)}, {example.kind} change: {segment}", loc="left")
    panels = {
        "image": example.image,
        "labels": blend_classes(example.image, example.truth, palette),
        f"Source, {100 * example.accuracy_before:.1f}": blend_classes(example.image, example.before, palette),
        f"{shorten(method, 30)}, {100 * example.accuracy_after:.1f}": blend_classes(
            example.image, example.after, palette
        ),
    }
    for axes, (name, pixels) in zip(row, panels.items(), strict=True):
        axes.imshow(pixels, interpolation="none")
        axes.set_xlabel(name, labelpad=3)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)


def _choose_example_palette(example: SceneExample) -> NDArray[np.uint8]:
    if example.class_names:
        return choose_palette(example.class_names, len(example.class_names))
    maps = (example.truth, example.before, example.after)
    highest = max(classes[classes != IGNORE_INDEX].max(initial=0) for classes in maps)
    return choose_palette((), int(highest) + 1)


def blend_classes(
    image: NDArray[np.uint8], classes: NDArray[np.unsignedinteger], palette: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return class colors over the image in gray, so that only classes are colored; black where there is no class."""
    gray = image.astype(np.float32).mean(2, keepdims=True)
    has_class = classes < len(palette)
    colors = palette[np.where(has_class, classes, 0)]
    mixed = np.where(has_class[..., None], OPACITY * colors + (1 - OPACITY) * gray, 0)
    return mixed.round().astype(np.uint8)


def _draw_legend(figure: Figure, examples: Sequence[SceneExample]) -> None:
    names = examples[0].class_names
    if names:
        patches = [
            Patch(facecolor=color / 255, edgecolor=FAINT, linewidth=0.6, label=name)
            for name, color in zip(names, _choose_example_palette(examples[0]), strict=True)
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(names), 10), handlelength=1.2)
