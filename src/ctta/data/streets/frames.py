"""Frames by index: an image in one weather condition, with its labels and distances."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ctta.core.validation import check_choice, check_integer
from ctta.data.corruptions.arrays import Float32Array, UInt8Array
from ctta.data.streets.classes import LabelMap
from ctta.data.streets.lighting import dusk, night
from ctta.data.streets.rng import SceneRNG
from ctta.data.streets.scene import Scene, render_scene
from ctta.data.streets.weather import dust, fog, rain, snow
from ctta.errors import ConfigError

Condition = Callable[[Scene, SceneRNG], Float32Array]

#: Incremented whenever the same arguments give other pixels or labels: part of the hash of a stream.
VERSION = 1


def clear(scene: Scene, rng: SceneRNG) -> Float32Array:
    """Render the scene in clear weather."""
    return scene.clear


#: Clear weather to train in, and the four conditions that results are reported for, in the order of the paper.
CONDITIONS: dict[str, Condition] = {"clear": clear, "fog": fog, "night": night, "rain": rain, "snow": snow}

#: Two more to choose hyperparameters on, so that the four stay unseen.
HOLD_OUT: dict[str, Condition] = {"dusk": dusk, "dust": dust}

#: The conditions that the scenes of each split may be rendered in. No scene occurs in two splits.
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("clear",),
    "choose": ("clear", *HOLD_OUT),
    "report": tuple(CONDITIONS),
}
MIN_SIDE = 32  # pixels; below, nothing can be recognized


@dataclass(frozen=True)
class Frame:
    """An image with its ground truth.

    Attributes:
        image: uint8 (H, W, 3).
        label: Indices into ``CLASSES``, uint8 (H, W).
        distance: Meters along each pixel's ray, (H, W); infinite for the sky.
    """

    image: UInt8Array
    label: LabelMap
    distance: Float32Array


def render_frame(
    index: int, condition: str = "clear", *, split: str = "report", seed: int = 0, size: tuple[int, int] = (128, 256)
) -> Frame:
    """Render one frame, a pure function of its arguments.

    Scene and labels depend on (seed, split, index, size) only: every condition shows the same street.

    Args:
        index: Index of the scene, from 0; there is no upper limit.
        condition: "clear", "fog", "night", "rain" or "snow", or "dusk" or "dust" to choose settings on.
        split: "train", "choose" or "report"; each has its own scenes and conditions, see ``SPLITS``.
        seed: Seed of the scenes.
        size: (height, width) in pixels.

    Returns:
        The image, its labels and its distances.

    Raises:
        ConfigError: An argument is out of range, or the split does not allow the condition.

    >>> foggy = render_frame(3, "fog")
    >>> foggy.image.shape, foggy.label.shape, bool((foggy.label == render_frame(3, "clear").label).all())
    ((128, 256, 3), (128, 256), True)
    """
    check_condition(condition, split)
    seed = check_integer("seed", seed)
    index = check_integer("index", index, 0)
    height, width = validate_size(size)
    scene = render_scene(seed, split, index, height, width)
    color = (CONDITIONS | HOLD_OUT)[condition](scene, SceneRNG(seed, f"{split} {condition}", index))
    np.clip(color, 0, 1, out=color)
    color *= np.float32(255)
    image = np.rint(color, out=color).astype(np.uint8)
    return Frame(np.ascontiguousarray(image.transpose(1, 2, 0)), scene.label, scene.distance)


def check_condition(condition: str, split: str) -> None:
    """Raise unless the split exists and its scenes may be rendered in the condition."""
    check_choice("split", split, tuple(SPLITS))
    check_choice("condition", condition, (*CONDITIONS, *HOLD_OUT))
    if condition not in SPLITS[split]:
        allowed = [name for name, conditions in SPLITS.items() if condition in conditions]
        raise ConfigError(
            f"split {split!r} has {', '.join(SPLITS[split])}, got {condition!r}: use split={allowed[0]!r}; "
            "the splits keep training and model selection apart from the reported results"
        )


def validate_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width), or raise unless both are large enough."""
    if not isinstance(size, tuple) or len(size) != 2:
        raise ConfigError(f"size must be (height, width), got {size!r}")
    return check_integer("height", size[0], MIN_SIDE), check_integer("width", size[1], MIN_SIDE)
