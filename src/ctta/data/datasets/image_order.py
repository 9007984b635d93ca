"""The order in which image files are read: shuffled by name, by name, or by time."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from ctta.core.validation import check_choice, check_integer

Order = Literal["shuffle", "name", "time"]
ORDERS: tuple[Order, ...] = get_args(Order)

#: Folders that cameras and phones name by date: 2026, 2026-11, 20261117, 2026_11_17_08.
_DATE = re.compile(r"(19|20)\d\d([-_.]?\d\d){0,5}")


def check_order(order: str | None) -> None:
    """Raise unless an order is one of :data:`ORDERS`, or None for the default."""
    if order is not None:
        check_choice("order", order, ORDERS)


def is_class_tree(names: Sequence[str]) -> bool:
    """Return whether images lie in a folder per class, so that their names put one class after the other.

    That is: no image is at the root, there are at least two folders of images, and not all of them are below folders
    that are named by date, as a camera names them.

    Args:
        names: Paths relative to the root, with slashes.

    Returns:
        Whether to shuffle the images by default.

    >>> is_class_tree(["cat/1.png", "dog/1.png"]), is_class_tree(["1.png", "2.png", "later/3.png"])
    (True, False)
    >>> is_class_tree(["2026-11-16/0815.png", "2026-11-17/0815.png"])
    False
    """
    folders = {name.rpartition("/")[0] for name in names}
    is_dated = all(_DATE.fullmatch(folder.partition("/")[0]) for folder in folders)
    return len(folders) > 1 and "" not in folders and not is_dated


def sort_images(root: Path, names: Sequence[str], order: Order, *, seed: int = 0) -> list[int]:
    """Return the positions of images in an order.

    A shuffled image is sorted by a hash of its own name, so that its place relative to the others does not depend on
    which others there are: if images are added or removed, the rest keep their order.

    Args:
        root: Folder that the names are relative to.
        names: Paths relative to the root, with slashes.
        order: "shuffle"; "name", by path; or "time", by the time of the last modification and then by path.
        seed: Seed of the shuffle.

    Returns:
        A permutation of the positions in ``names``.

    Raises:
        ConfigError: There is no such order.
    """
    check_order(order)
    if order == "shuffle":
        check_integer("seed", seed)
        keys = [(_hash_name(seed, name), name) for name in names]
        return sorted(range(len(names)), key=keys.__getitem__)
    by_path = [Path(name) for name in names]
    if order == "name":
        return sorted(range(len(names)), key=by_path.__getitem__)
    times = [_modification_time(root / name) for name in names]
    return sorted(range(len(names)), key=lambda row: (times[row], by_path[row]))


def _hash_name(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}/".encode() + os.fsencode(name), digest_size=8).digest()


def _modification_time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # deleted meanwhile; whoever reads it reports that
        return 0
