"""A picture file that came over the network, as an input."""

import io

import numpy as np
from torch import Tensor

from ctta.datasets.arrays import to_unit_floats
from ctta.datasets.image_files import Resize, to_upright_rgb
from ctta.io.images import decoding_errors, import_pillow
from ctta.serve.errors import Refusal

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


def read_image(body: bytes, *, size: tuple[int, int] | None, max_pixels: int) -> Tensor:
    """A batch of one in [0, 1], resized to (height, width) if given; a refusal if it is no picture or too large."""
    try:
        with import_pillow().open(io.BytesIO(body), formats=FORMATS) as file:
            width, height = file.size  # known before anything is unpacked
            if width * height > max_pixels:
                raise Refusal(413, f"the picture has {width}x{height} pixels, and {max_pixels} are allowed: shrink it")
            picture = to_upright_rgb(file, "the picture")
    except decoding_errors() as error:  # a ValueError among them, and so ours
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "BytesIO" in reason:  # Pillow names the file, and this one has no name
            reason = "send the file itself and no form, as curl --data-binary @picture.png does"
        raise Refusal(400, f"the body is no readable picture ({', '.join(FORMATS)}): {reason}") from error
    return to_unit_floats(np.array(Resize(size)(picture) if size else picture)[None])
