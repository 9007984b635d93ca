"""Draw docs/corruptions.png: one photograph under every corruption and severity, from our own generator.

    python benchmarks/draw_corruptions.py [PICTURE] [--out PNG]

Without a picture it takes the one that the tests compare with the published code's: a public-domain photograph of a cup
of coffee, 224x224, in tests/data/corruptions_reference.npz.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ctta.corruptions import CORRUPTIONS, HOLD_OUT, corrupt
from ctta.io.images import resize_and_center_crop

REPOSITORY = Path(__file__).parents[1]
SEVERITIES = (1, 2, 3, 4, 5)
PANEL, GAP, NAMES, TITLES = 96, 2, 124, 24  # pixels: a picture, between two, left of them, above them
BLOCKS = 2  # side by side
FONT_SIZE = 13


def photograph(path: Path | None) -> NDArray[np.uint8]:
    """One image (224, 224, 3)."""
    if path is None:
        with np.load(REPOSITORY / "tests" / "data" / "corruptions_reference.npz") as arrays:
            stored: NDArray[np.uint8] = arrays["clean_224"][0]
        return stored
    with Image.open(path) as picture:
        return np.asarray(resize_and_center_crop(picture.convert("RGB")))


def drawn(image: NDArray[np.uint8]) -> Image.Image:
    """The sheet: a row for each corruption, the clean image first, then severities 1 to 5."""
    names = [*CORRUPTIONS, *HOLD_OUT]
    rows = -(-len(names) // BLOCKS)
    step, block = PANEL + GAP, NAMES + (1 + len(SEVERITIES)) * (PANEL + GAP) + 4 * GAP
    sheet = Image.new("RGB", (BLOCKS * block, TITLES + rows * step), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_SIZE)
    for number, name in enumerate(names):
        left, top = number // rows * block, TITLES + number % rows * step
        if number % rows == 0:
            for column, title in enumerate(("clean", *(f"severity {severity}" for severity in SEVERITIES))):
                middle = left + NAMES + column * step + PANEL // 2
                draw.text((middle, TITLES // 2), title, "black", font, anchor="mm")
        held_out = " *" if name in HOLD_OUT else ""
        draw.text((left + 6, top + PANEL // 2), name.replace("_", " ") + held_out, "black", font, anchor="lm")
        pictures = [image, *(corrupt(image[None], name, severity)[0] for severity in SEVERITIES)]
        for column, pixels in enumerate(pictures):
            panel = Image.fromarray(pixels).resize((PANEL, PANEL), Image.Resampling.LANCZOS)
            sheet.paste(panel, (left + NAMES + column * step, top))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw one picture under every corruption and severity.")
    parser.add_argument("picture", type=Path, nargs="?", help="by default a photograph of the tests")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "corruptions.png")
    arguments = parser.parse_args()
    drawn(photograph(arguments.picture)).save(arguments.out, optimize=True)
    print(arguments.out)


if __name__ == "__main__":
    main()
