"""The corruptions by name, and the one function that applies them to a batch."""

from collections.abc import Callable
from functools import partial

from numpy.typing import ArrayLike

from ctta.corruptions.arrays import Int64Array, UInt8Array
from ctta.corruptions.batches import Batch, checked_index, in_chunks, like, to_bytes
from ctta.corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from ctta.corruptions.digital import contrast, elastic_transform, jpeg_compression, pixelate, saturate
from ctta.corruptions.frost import PhotoPaths
from ctta.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from ctta.corruptions.rng import PerImageRNG
from ctta.corruptions.spatter import spatter
from ctta.corruptions.weather import brightness, fog, frost, snow
from ctta.validation import check_integer

Corruption = Callable[[UInt8Array, int, PerImageRNG], UInt8Array]

#: Raised whenever the same arguments give other pixels: it is part of the hash of a stream, and of made_from.json.
VERSION = 1

# The benchmark's fifteen, in its order.
CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}

# Four more to choose hyperparameters on, so that the fifteen stay unseen.
HOLD_OUT: dict[str, Corruption] = {
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "spatter": spatter,
    "saturate": saturate,
}


def corrupt(
    images: Batch,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    index: ArrayLike | None = None,
    frost_photos: PhotoPaths | None = None,
) -> Batch:
    """Corrupt a batch of images as the CIFAR-C and ImageNet-C benchmarks do.

    The draw for an image depends on (seed, name, severity, its index) only: it gives the same pixels alone or
    in any batch. Images of 32x32 and 224x224 take the published parameters. Other sizes take the set that is
    nearer as a ratio, √(H·W) against 32 and 224, with every length (blur widths, radii, displacements, zoom
    of the snow flakes, scale of the frost) multiplied by √(H·W)/32 or √(H·W)/224; fog draws its cloud on the
    next power of two; noise, colour, zoom blur, pixelation and JPEG quality have no length and stay.

    Args:
        images: uint8 numpy (N, H, W, 3), or float torch or numpy (N, 3, H, W) in [0, 1], at least 8 pixels a
            side. Float32Array are taken at 8 bits, so all kinds give the same pixels.
        name: a key of CORRUPTIONS or HOLD_OUT.
        severity: 1 (weak) to 5 (strong).
        seed: another seed, another draw.
        index: the identity of each image, by default its place in the batch: 0, 1, 2, …
        frost_photos: a folder with, or a list of, photographs for "frost", instead of those shipped.

    Returns:
        The corrupted images: same kind, shape, dtype and device.

    >>> import numpy as np
    >>> grey = np.full((2, 32, 32, 3), 128, np.uint8)
    >>> noisy = corrupt(grey, "gaussian_noise", severity=5)
    >>> noisy.shape, bool((noisy[1] == corrupt(grey[1:], "gaussian_noise", 5, index=[1])[0]).all())
    ((2, 32, 32, 3), True)
    """
    check_corruption(name, severity)
    check_integer("seed", seed)
    pixels = to_bytes(images)
    places = checked_index(index, len(pixels))
    apply = partial(frost, photos=frost_photos) if name == "frost" else (CORRUPTIONS | HOLD_OUT)[name]

    def chunk(part: UInt8Array, part_index: Int64Array) -> UInt8Array:
        return apply(part, severity, PerImageRNG(seed, name, severity, part_index))

    return like(in_chunks(chunk, pixels, places), images)


def check_corruption(name: str, severity: int) -> None:
    """Whether there is such a corruption, at such a strength."""
    known = CORRUPTIONS | HOLD_OUT
    if name not in known:
        raise ValueError(f"unknown corruption {name!r}; expected one of {', '.join(known)}")
    check_integer("severity", severity)
    if not 1 <= severity <= 5:
        raise ValueError(f"severity is {severity}; expected an integer from 1 to 5")
