"""Images for the tests of the corruptions."""

import numpy as np
from numpy.typing import NDArray


def random_images(count: int, height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return smooth colorful images with some grain."""
    rng = np.random.default_rng(seed)
    rows, columns = (np.linspace(0, 1, side)[:, None] ** [1, 2, 3] for side in (height, width))
    smooth = np.einsum("nijc,hi,wj->nhwc", rng.normal(0, 150, (count, 3, 3, 3)), rows, columns) + 128
    images: NDArray[np.uint8] = np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    return images
