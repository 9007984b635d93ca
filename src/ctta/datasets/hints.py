"""What to do about data that is missing or damaged: the commands, by what is being read."""

from pathlib import Path

#: The parts in which ImageNet-C is published, and what each holds.
GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "spatter", "gaussian_blur", "saturate"),
}
GROUP_OF = {corruption: group for group, corruptions in GROUPS.items() for corruption in corruptions}


def for_cifar_c(folder: Path) -> str:
    return f"{_fetching(folder, 'cifar10-c')} (or cifar100-c), or make your own: ctta corrupt SRC DST"


def for_imagenet_c(corruption: str, folder: Path) -> str:
    """`folder` is what has to go before the group can be fetched again."""
    if corruption not in GROUP_OF:
        return f"ImageNet-C has no {corruption}: check the name, or make your own: ctta corrupt SRC DST"
    return f"{_fetching(folder, f'imagenet-c/{GROUP_OF[corruption]}')}, or make your own: ctta corrupt SRC DST"


def for_clean_cifar(folder: Path) -> str:
    return f"{_fetching(folder, 'cifar10')}, or extract the archive of CIFAR-100 again"


def _fetching(folder: Path, name: str) -> str:
    # What is there is not fetched again; and nobody should be told to delete a folder on account of a slip of the pen.
    delete = f"; if it is right, delete {folder}" if folder.is_dir() else ""
    return f"check the path{delete} and run: ctta data get {name}"
