"""Draw docs/figures/corruptions.png: one photograph under every corruption and severity.

    python -m benchmarks.draw.corruptions [IMAGE] [--out PNG]

The default is the image that the tests compare with the published code: a public-domain photograph of a cup of coffee,
224x224, in tests/data/corruptions_reference.npz.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT, corrupt
from ctta.io.images import resize_and_center_crop

REPOSITORY = Path(__file__).parents[2]
SEVERITIES = (1, 2, 3, 4, 5)
PANEL, GAP, NAME_WIDTH, TITLE_HEIGHT = 96, 2, 124, 24  # pixels
NUM_BLOCKS = 2  # side by side
FONT_SIZE = 13


def load_image(path: Path | None) -> NDArray[np.uint8]:
    """Return one image (224, 224, 3)."""
    if path is None:
        with np.load(REPOSITORY / "tests" / "data" / "corruptions_reference.npz") as arrays:
            stored: NDArray[np.uint8] = arrays["clean_224"][0]
        return stored
    with Image.open(path) as image:
        return np.asarray(resize_and_center_crop(image.convert("RGB")))


def draw_sheet(image: NDArray[np.uint8]) -> Image.Image:
    """Draw a row for each corruption: the clean image, then severities 1 to 5."""
    names = [*CORRUPTIONS, *HOLD_OUT]
    num_rows = -(-len(names) // NUM_BLOCKS)
    step, block = PANEL + GAP, NAME_WIDTH + (1 + len(SEVERITIES)) * (PANEL + GAP) + 4 * GAP
    sheet = Image.new("RGB", (NUM_BLOCKS * block, TITLE_HEIGHT + num_rows * step), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_SIZE)
    for number, name in enumerate(names):
        left, top = number // num_rows * block, TITLE_HEIGHT + number % num_rows * step
        if number % num_rows == 0:
            for column, title in enumerate(("clean", *(f"severity {severity}" for severity in SEVERITIES))):
                center = left + NAME_WIDTH + column * step + PANEL // 2
                draw.text((center, TITLE_HEIGHT // 2), title, "black", font, anchor="mm")
        mark = " *" if name in HOLD_OUT else ""
        draw.text((left + 6, top + PANEL // 2), name.replace("_", " ") + mark, "black", font, anchor="lm")
        images = [image, *(corrupt(image[None], name, severity)[0] for severity in SEVERITIES)]
        for column, pixels in enumerate(images):
            panel = Image.fromarray(pixels).resize((PANEL, PANEL), Image.Resampling.LANCZOS)
            sheet.paste(panel, (left + NAME_WIDTH + column * step, top))
    return sheet


def main() -> None:
    """Parse arguments, draw and save."""
    parser = argparse.ArgumentParser(description="Draw one image under every corruption and severity.")
    parser.add_argument("image", type=Path, nargs="?", help="by default a photograph of the tests")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "figures" / "corruptions.png")
    arguments = parser.parse_args()
    draw_sheet(load_image(arguments.image)).save(arguments.out, optimize=True)
    print(arguments.out)


if __name__ == "__main__":
    main()
