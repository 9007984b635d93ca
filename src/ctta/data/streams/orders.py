"""Published orders of the fifteen corruptions."""

from collections.abc import Sequence

from ctta.errors import ConfigError, did_you_mean

STANDARD_ORDER = (
    "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog "
    "brightness contrast elastic_transform pixelate jpeg_compression"
)

#: The ten random orders of the authors' code, for gradual CIFAR10-C and ImageNet-C.
RANDOM_ORDERS = (
    "brightness pixelate gaussian_noise motion_blur zoom_blur glass_blur impulse_noise jpeg_compression "
    "defocus_blur elastic_transform shot_noise frost snow fog contrast",
    "jpeg_compression shot_noise zoom_blur frost contrast fog defocus_blur elastic_transform gaussian_noise "
    "brightness glass_blur impulse_noise pixelate snow motion_blur",
    "contrast defocus_blur gaussian_noise shot_noise snow frost glass_blur zoom_blur elastic_transform "
    "jpeg_compression pixelate brightness impulse_noise motion_blur fog",
    "shot_noise fog glass_blur pixelate snow elastic_transform brightness impulse_noise defocus_blur frost "
    "contrast gaussian_noise motion_blur jpeg_compression zoom_blur",
    "pixelate glass_blur zoom_blur snow fog impulse_noise brightness motion_blur frost jpeg_compression "
    "gaussian_noise shot_noise contrast defocus_blur elastic_transform",
    "motion_blur snow fog shot_noise defocus_blur contrast zoom_blur brightness frost elastic_transform "
    "glass_blur gaussian_noise pixelate jpeg_compression impulse_noise",
    "frost impulse_noise jpeg_compression contrast zoom_blur glass_blur pixelate snow defocus_blur "
    "motion_blur brightness elastic_transform shot_noise fog gaussian_noise",
    "glass_blur zoom_blur impulse_noise fog snow jpeg_compression gaussian_noise frost shot_noise brightness "
    "contrast motion_blur pixelate defocus_blur elastic_transform",
    "defocus_blur motion_blur zoom_blur shot_noise gaussian_noise glass_blur jpeg_compression fog contrast "
    "pixelate frost snow brightness elastic_transform impulse_noise",
    "contrast gaussian_noise defocus_blur zoom_blur frost glass_blur jpeg_compression fog pixelate "
    "elastic_transform shot_noise impulse_noise snow motion_blur brightness",
)

#: The corruptions by kind, as ImageNet-C groups them; the last of each is one of the four to choose settings on.
KINDS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    "weather": ("snow", "frost", "fog", "brightness", "spatter"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
}


def corruption_order(order: int | None = None) -> tuple[str, ...]:
    """Return the corruptions in the standard order, or in one of the ten random orders of the authors' code.

    Args:
        order: None for the standard order, or 0 to 9.

    Returns:
        The names of the fifteen corruptions.

    Raises:
        ConfigError: There is no such order.

    >>> corruption_order()[:2], corruption_order(9)[0]
    (('gaussian_noise', 'shot_noise'), 'contrast')
    """
    if order is not None and order not in range(len(RANDOM_ORDERS)):
        raise ConfigError(f"order must be None (standard) or 0 to {len(RANDOM_ORDERS) - 1}, got {order!r}")
    return tuple((STANDARD_ORDER if order is None else RANDOM_ORDERS[order]).split())


def group_by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    """Return corruptions by kind, the kinds in the order of their first corruption.

    Args:
        names: Names of corruptions.

    Returns:
        The names of each kind.

    Raises:
        ConfigError: A corruption is of no known kind.

    >>> group_by_kind(["fog", "contrast", "snow"])
    {'weather': ['fog', 'snow'], 'digital': ['contrast']}
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind = next((kind for kind, members in KINDS.items() if name in members), None)
        if kind is None:
            known = [member for members in KINDS.values() for member in members]
            raise ConfigError(f"{name!r} is of no known kind{did_you_mean(name, known)}: leave it out")
        kinds.setdefault(kind, []).append(name)
    return kinds
