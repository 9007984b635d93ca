"""The array types the corruptions pass around, and the one way results become bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]  # images (N, H, W, 3), values 0..255
Float32Array = NDArray[np.float32]  # anything on its way to bytes, on the same 0..255 scale unless said
Int64Array = NDArray[np.int64]


def truncated(values: NDArray[np.floating[Any]]) -> UInt8Array:
    """Clip to 0..255 and drop the fraction: the published files are truncated, not rounded."""
    clipped: NDArray[np.floating[Any]] = np.clip(values, 0, 255)
    return clipped.astype(np.uint8)
