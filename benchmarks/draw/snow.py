"""Draw docs/figures/snow.webp: a network on streets in snow, as it is and adapted.

    python -m benchmarks.draw.snow [--scenes 24] [--out WEBP]

The network was trained in clear weather and adapts frame by frame, without labels. Of the second half of the stream the
picture shows the scenes whose gain is at a quarter, at the middle and at three quarters of all, so that nobody has
chosen them; the titles have the mean IoU over that half.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import ctta
from benchmarks.networks.load import streets_bn
from ctta.data.streets import CLASSES, PALETTE, render_frame

REPOSITORY = Path(__file__).parents[2]
GAP, TITLE_HEIGHT, LEGEND_HEIGHT, FONT_SIZE = 6, 24, 24, 13
SHOWN = (0.25, 0.5, 0.75)  # quantiles of the gain


def predict(model: torch.nn.Module, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the predicted label map; a method adapts to the image on the way."""
    x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        label: NDArray[np.uint8] = model(x).argmax(1)[0].numpy().astype(np.uint8)
    return label


def count_matches(prediction: NDArray[np.uint8], label: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return intersection and union of every class, (2, classes)."""
    classes = np.arange(len(CLASSES))[:, None, None]
    predicted, labeled = prediction == classes, label == classes
    counts = [(predicted & labeled).sum((1, 2)), (predicted | labeled).sum((1, 2))]
    return np.asarray(counts, dtype=np.int64)


def mean_iou(counts: NDArray[np.int64]) -> float:
    """Return the mean over the classes that occur."""
    intersection, union = counts
    return float((intersection[union > 0] / union[union > 0]).mean())


def draw_sheet(num_scenes: int) -> Image.Image:
    """Return a row of four images for each scene that is shown, above a legend."""
    net = streets_bn()
    models = {"as trained": ctta.Source(net), "ctta.adapt(net)": ctta.adapt(net)}
    scenes = [render_frame(index, "snow") for index in range(num_scenes)]
    maps = {name: [predict(model, scene.image) for scene in scenes] for name, model in models.items()}
    half = range(num_scenes // 2, num_scenes)
    counts = {name: np.stack([count_matches(found[i], scenes[i].label) for i in half]) for name, found in maps.items()}
    gains = [mean_iou(after) - mean_iou(before) for before, after in zip(*counts.values(), strict=True)]
    ranked = [half[place] for place in np.argsort(gains)]
    shown = [ranked[round(quantile * (len(ranked) - 1))] for quantile in SHOWN]
    titles = {name: f"{name}: mIoU {100 * mean_iou(each.sum(0)):.1f} %" for name, each in counts.items()}
    before, after = models
    columns = ["streets in snow", titles[before], titles[after], "labels, which it never saw"]
    height, width, _ = scenes[0].image.shape
    size = len(columns) * (width + GAP) + GAP, TITLE_HEIGHT + len(shown) * (height + GAP) + LEGEND_HEIGHT
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    for column, title in enumerate(columns):
        draw.text((GAP + column * (width + GAP), TITLE_HEIGHT // 2), title, "black", font, anchor="lm")
    for row, index in enumerate(shown):
        label_maps = PALETTE[maps[before][index]], PALETTE[maps[after][index]], PALETTE[scenes[index].label]
        for column, pixels in enumerate((scenes[index].image, *label_maps)):
            place = GAP + column * (width + GAP), TITLE_HEIGHT + row * (height + GAP)
            sheet.paste(Image.fromarray(pixels), place)
    left, center = GAP, sheet.height - LEGEND_HEIGHT // 2
    for name, color in zip(CLASSES, PALETTE.tolist(), strict=True):
        draw.rectangle((left, center - 6, left + 12, center + 6), tuple(color), "black")
        draw.text((left + 17, center), name, "black", font, anchor="lm")
        left += 30 + round(draw.textlength(name, font))
    return sheet


def main() -> None:
    """Parse arguments, draw and save."""
    parser = argparse.ArgumentParser(description="Draw a network on streets in snow, as it is and adapted.")
    parser.add_argument("--scenes", type=int, default=24, help="length of the stream")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "figures" / "snow.webp")
    arguments = parser.parse_args()
    draw_sheet(arguments.scenes).save(arguments.out, quality=80, method=6)
    print(arguments.out, f"{arguments.out.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
