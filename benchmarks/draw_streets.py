"""Draw docs/streets.png: scenes of the embedded street in every kind of weather, their labels and distances.

python benchmarks/draw_streets.py [--scenes 39 45] [--out PNG]
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ctta.synthetic import CLASSES, CONDITIONS, HOLD_OUT, PALETTE, Frame, render_frame

REPOSITORY = Path(__file__).parents[1]
GAP, NAMES, LEGEND = 2, 76, 22  # pixels: between two pictures, left of them, below them
KEPT_BITS = 0xFC  # of each byte: noise in the lowest two would double the file, and nobody sees it
FONT_SIZE = 13
PALE_AT = 40.0  # metres at which a distance is drawn in a third of full brightness


def column(index: int) -> dict[str, NDArray[np.uint8]]:
    """All pictures of one scene; the hold-out weather shows another one, as it does wherever it is used."""
    frames: dict[str, Frame] = {name: render_frame(index, name) for name in CONDITIONS}
    held_out = {f"{name} *": render_frame(index, name, split="choose").image for name in HOLD_OUT}
    clear = frames["clear"]
    grey = (255 * np.exp(-clear.distance / PALE_AT)).astype(np.uint8)
    return {
        "clear": clear.image,
        "labels": PALETTE[clear.label],
        "distance": np.repeat(grey[..., None], 3, axis=2),
        **{name: made.image for name, made in frames.items() if name != "clear"},
        **held_out,
    }


def drawn(scenes: list[int]) -> Image.Image:
    """The sheet: a column for each scene, a row for each kind of picture."""
    columns = [column(index) for index in scenes]
    height, width, _ = columns[0]["clear"].shape
    sheet = Image.new("RGB", (NAMES + len(columns) * (width + GAP), len(columns[0]) * (height + GAP) + LEGEND), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_SIZE)
    for row, name in enumerate(columns[0]):
        top = row * (height + GAP)
        draw.text((6, top + height // 2), name, "black", font, anchor="lm")
        for number, pictures in enumerate(columns):
            sheet.paste(Image.fromarray(pictures[name]), (NAMES + number * (width + GAP), top))
    left, middle = 6, sheet.height - LEGEND // 2
    for name, colour in zip(CLASSES, PALETTE.tolist(), strict=True):
        draw.rectangle((left, middle - 6, left + 12, middle + 6), tuple(colour), "black")
        draw.text((left + 17, middle), name, "black", font, anchor="lm")
        left += 26 + round(draw.textlength(name, font))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw scenes of the embedded street in every kind of weather.")
    parser.add_argument("--scenes", type=int, nargs="+", default=[39, 45])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "streets.png")
    arguments = parser.parse_args()
    sheet = np.asarray(drawn(arguments.scenes)) & np.uint8(KEPT_BITS)
    Image.fromarray(sheet).save(arguments.out, optimize=True)
    print(f"{arguments.out} ({arguments.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
