"""The corruptions by name, and :func:`corrupt`, which applies them to a batch."""

from collections.abc import Callable
from functools import partial
from math import ceil

from numpy.typing import ArrayLike

from ctta.core.validation import check_integer, check_number
from ctta.data.corruptions.arrays import (
    BatchT,
    Int64Array,
    PerImageRNG,
    UInt8Array,
    images_to_uint8,
    map_chunks,
    restore_format,
    validate_index,
)
from ctta.data.corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from ctta.data.corruptions.digital import contrast, elastic_transform, jpeg_compression, pixelate, saturate
from ctta.data.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from ctta.data.corruptions.weather import PhotoPaths, brightness, fog, frost, snow, spatter
from ctta.errors import ConfigError, did_you_mean

Corruption = Callable[[UInt8Array, float, PerImageRNG], UInt8Array]

#: Incremented whenever the same arguments give other pixels: part of the hash of a stream, and of made_from.json.
VERSION = 1

_BY_KIND: dict[str, tuple[Corruption, ...]] = {
    "noise": (gaussian_noise, shot_noise, impulse_noise, speckle_noise),
    "blur": (defocus_blur, glass_blur, motion_blur, zoom_blur, gaussian_blur),
    "weather": (snow, frost, fog, brightness, spatter),
    "digital": (contrast, elastic_transform, pixelate, jpeg_compression, saturate),
}

#: The corruptions by kind, as ImageNet-C groups them; the last of each is one of the four to choose settings on.
KINDS = {kind: tuple(each.__name__ for each in members) for kind, members in _BY_KIND.items()}
KIND_OF = {name: kind for kind, members in KINDS.items() for name in members}

#: The fifteen corruptions of the benchmark, in its order.
CORRUPTIONS: dict[str, Corruption] = {each.__name__: each for members in _BY_KIND.values() for each in members[:-1]}

#: Four more to choose hyperparameters on, so that the fifteen stay unseen.
HOLD_OUT: dict[str, Corruption] = {members[-1].__name__: members[-1] for members in _BY_KIND.values()}

#: Others, which are neither reported on nor chosen on: to add a corruption, enter it here.
OTHERS: dict[str, Corruption] = {}


def corrupt(
    images: BatchT,
    name: str,
    severity: float,
    *,
    seed: int = 0,
    index: ArrayLike | None = None,
    frost_photos: PhotoPaths | None = None,
) -> BatchT:
    """Corrupt a batch of images as the CIFAR-C and ImageNet-C benchmarks do.

    The draws for an image depend on (seed, name, severity, its index) only: it gets the same pixels alone or in any
    batch. Between two whole severities the parameters are interpolated linearly, and the draws are those of the larger
    one, so that the corruption of an image grows steadily up to that.

    Images of 32x32 and 224x224 take the published parameters. Other sizes take the set that is closer as a ratio,
    √(H·W) against 32 and 224, with every length (blur widths, radii, displacements, zoom of the snowflakes, scale of
    the frost) multiplied by √(H·W)/32 or √(H·W)/224; fog draws its cloud on the next power of two; noise, color, zoom
    blur, pixelation and JPEG quality have no length and stay the same.

    Args:
        images: uint8 numpy array (N, H, W, 3), or float torch tensor or numpy array (N, 3, H, W) in [0, 1]; at least 8
            pixels a side. Floats are rounded to 8 bits, so all formats give the same pixels.
        name: A key of ``CORRUPTIONS``, ``HOLD_OUT`` or ``OTHERS``.
        severity: 1 (weak) to 5 (strong), or any number between 0, which leaves the images as they are, and 5.
        seed: Seed of the draws.
        index: Identity of each image, by default its position in the batch: 0, 1, 2, …
        frost_photos: A folder with, or a list of, photographs for "frost", instead of those shipped.

    Returns:
        The corrupted images, in the container, shape, dtype and device of ``images``.

    Raises:
        InputError: The shape or the values of ``images`` or ``index`` are wrong.
        ConfigError: There is no such corruption, severity or photograph.
        TypeError: An argument has the wrong type or dtype.

    >>> import numpy as np
    >>> gray = np.full((2, 32, 32, 3), 128, np.uint8)
    >>> noisy = corrupt(gray, "gaussian_noise", severity=5)
    >>> noisy.shape, bool((noisy[1] == corrupt(gray[1:], "gaussian_noise", 5, index=[1])[0]).all())
    ((2, 32, 32, 3), True)
    """
    severity = check_corruption(name, severity)
    seed = check_integer("seed", seed)
    pixels = images_to_uint8(images)
    places = validate_index(index, len(pixels))
    if severity == 0:
        return restore_format(pixels.copy(), images)
    apply = partial(frost, photos=frost_photos) if name == "frost" else (CORRUPTIONS | HOLD_OUT | OTHERS)[name]

    def corrupt_chunk(chunk: UInt8Array, chunk_index: Int64Array) -> UInt8Array:
        return apply(chunk, severity, PerImageRNG(seed, name, ceil(severity), chunk_index))

    return restore_format(map_chunks(corrupt_chunk, pixels, places), images)


def check_corruption(name: str, severity: float) -> float:
    """Check the name of a corruption and its severity; return the severity, as a Python ``int`` if it is whole."""
    known = CORRUPTIONS | HOLD_OUT | OTHERS
    if name not in known:
        raise ConfigError(f"unknown corruption {name!r}{did_you_mean(name, known)}; expected one of {', '.join(known)}")
    return check_severity(severity)


def check_severity(severity: float) -> float:
    """Raise unless a severity is a number from 0 to 5; return it, as a Python ``int`` if it is whole."""
    check_number("severity", severity)
    if not 0 <= severity <= 5:
        raise ConfigError(f"severity must be a number from 0 to 5, got {severity!r}")
    return int(severity) if severity == int(severity) else float(severity)
