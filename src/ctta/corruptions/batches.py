"""Batches of any accepted kind: in as bytes, out as what they were, a chunk at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ctta.corruptions.arrays import Int64Array, UInt8Array

Batch = TypeVar("Batch", NDArray[Any], torch.Tensor)

ACCEPTED = "a uint8 numpy array (N, H, W, 3), or a float torch tensor or numpy array (N, 3, H, W) in [0, 1]"
SMALLEST = 8  # pixels a side; below, kernels and zooms have nothing to work on
CHUNK_PIXELS = 1 << 17  # 128 images of 32x32, 2 of 224x224: arrays that stay in the cache


def to_bytes(images: NDArray[Any] | torch.Tensor) -> UInt8Array:
    """Any accepted batch as uint8 (N, H, W, 3); floats are rounded to the benchmark's 8 bits."""
    if isinstance(images, torch.Tensor):
        if not images.is_floating_point():
            raise TypeError(
                f"images is a torch tensor of {images.dtype}; expected {ACCEPTED}. "
                "Divide bytes by 255, or pass them as numpy (N, H, W, 3)"
            )
        values = images.detach().to("cpu", torch.float32 if images.dtype != torch.float64 else None).numpy()
    elif isinstance(images, np.ndarray):
        values = images
    else:
        raise TypeError(f"images is a {type(images).__name__}; expected {ACCEPTED}")

    is_bytes = values.dtype == np.uint8
    if not is_bytes and not np.issubdtype(values.dtype, np.floating):
        raise TypeError(f"images has dtype {values.dtype}; expected {ACCEPTED}")
    channels = -1 if is_bytes else 1
    if values.ndim != 4 or values.shape[channels] != 3:
        raise ValueError(f"images of {values.dtype} has shape {tuple(values.shape)}; expected {ACCEPTED}")
    if is_bytes:
        result: UInt8Array = values
    else:
        # The negation also catches NaN.
        if values.size and not (values.min() >= 0 and values.max() <= 1):
            raise ValueError(
                f"images has values from {values.min():.4g} to {values.max():.4g}; expected [0, 1]. "
                "Corrupt before normalising by mean and standard deviation"
            )
        result = np.rint(values.transpose(0, 2, 3, 1).astype(np.float32) * 255).astype(np.uint8)
    if min(result.shape[1:3]) < SMALLEST:
        raise ValueError(f"images are {result.shape[1]}x{result.shape[2]}; expected at least {SMALLEST} pixels a side")
    return result


def like(result: UInt8Array, images: Batch) -> Batch:
    """Give the corrupted bytes the kind, layout, dtype and device of the images they came from."""
    if isinstance(images, torch.Tensor):
        scaled = torch.from_numpy(result.transpose(0, 3, 1, 2)).to(torch.float32) / 255
        return scaled.contiguous().to(images.device, images.dtype)
    if images.dtype == np.uint8:
        return result
    values = result.transpose(0, 3, 1, 2) / np.float32(255)
    return np.ascontiguousarray(values.astype(images.dtype))


def checked_index(index: ArrayLike | None, count: int) -> Int64Array:
    """The identity of every image: its place in the batch unless given."""
    if index is None:
        return np.arange(count, dtype=np.int64)
    values = np.asarray(index)
    if values.shape != (count,):
        raise ValueError(f"index has shape {values.shape} for {count} images; expected one integer per image")
    if count and not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"index has dtype {values.dtype}; expected integers, the images' places in their dataset")
    if count and values.min() < 0:
        raise ValueError(f"index contains {values.min()}; expected places in a dataset, from 0")
    return values.astype(np.int64)


def in_chunks(
    corrupt: Callable[[UInt8Array, Int64Array], UInt8Array], images: UInt8Array, index: Int64Array
) -> UInt8Array:
    """Corrupt a few images at a time, to bound memory, on as many threads as torch may use.

    NumPy lets go of the interpreter lock in its loops, and draws do not depend on who is drawn with whom.
    """
    result = np.empty(images.shape, np.uint8)
    length = max(1, CHUNK_PIXELS // (images.shape[1] * images.shape[2]))
    chunks = [slice(start, start + length) for start in range(0, len(images), length)]

    def fill(chunk: slice) -> None:
        result[chunk] = corrupt(images[chunk], index[chunk])

    if len(chunks) <= 1 or torch.get_num_threads() == 1:
        for chunk in chunks:
            fill(chunk)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(fill, chunks):
                pass
    return result
