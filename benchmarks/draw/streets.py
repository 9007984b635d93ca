"""Draw docs/figures/streets.png: synthetic street scenes in every condition, with their labels and distances.

python -m benchmarks.draw.streets [--scenes 39 45] [--out PNG]
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ctta.data.streets import CLASSES, CONDITIONS, HOLD_OUT, PALETTE, render_frame

REPOSITORY = Path(__file__).parents[2]
GAP, NAME_WIDTH, LEGEND_HEIGHT = 2, 76, 22  # pixels
KEPT_BITS = 0xFC  # of each byte: invisible noise in the lowest two bits would double the file size
FONT_SIZE = 13
FADE_DISTANCE = 40.0  # meters at which the map of distances has faded to 1/e


def render_column(index: int) -> dict[str, NDArray[np.uint8]]:
    """Return all images of one scene by name; the hold-out conditions show the scene of their own split."""
    frames = {name: render_frame(index, name) for name in CONDITIONS}
    hold_out = {f"{name} *": render_frame(index, name, split="choose").image for name in HOLD_OUT}
    clear = frames.pop("clear")
    gray = (255 * np.exp(-clear.distance / FADE_DISTANCE)).astype(np.uint8)
    return {
        "clear": clear.image,
        "labels": PALETTE[clear.label],
        "distance": np.repeat(gray[..., None], 3, axis=2),
        **{name: frame.image for name, frame in frames.items()},
        **hold_out,
    }


def draw_sheet(scenes: list[int]) -> Image.Image:
    """Draw a column for each scene, and a row for each condition."""
    columns = [render_column(index) for index in scenes]
    height, width, _ = columns[0]["clear"].shape
    size = NAME_WIDTH + len(columns) * (width + GAP), len(columns[0]) * (height + GAP) + LEGEND_HEIGHT
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_SIZE)
    for row, name in enumerate(columns[0]):
        top = row * (height + GAP)
        draw.text((6, top + height // 2), name, "black", font, anchor="lm")
        for number, images in enumerate(columns):
            sheet.paste(Image.fromarray(images[name]), (NAME_WIDTH + number * (width + GAP), top))
    left, center = 6, sheet.height - LEGEND_HEIGHT // 2
    for name, color in zip(CLASSES, PALETTE.tolist(), strict=True):
        draw.rectangle((left, center - 6, left + 12, center + 6), tuple(color), "black")
        draw.text((left + 17, center), name, "black", font, anchor="lm")
        left += 26 + round(draw.textlength(name, font))
    return sheet


def main() -> None:
    """Parse arguments, draw and save."""
    parser = argparse.ArgumentParser(description="Draw synthetic street scenes in every condition.")
    parser.add_argument("--scenes", type=int, nargs="+", default=[39, 45])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "figures" / "streets.png")
    arguments = parser.parse_args()
    sheet = np.asarray(draw_sheet(arguments.scenes)) & np.uint8(KEPT_BITS)
    Image.fromarray(sheet).save(arguments.out, optimize=True)
    print(f"{arguments.out} ({arguments.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
