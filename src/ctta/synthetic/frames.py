"""Frames of the street by number: what is shown, in which weather, and what it truly is."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ctta.corruptions.arrays import Float32Array, UInt8Array
from ctta.synthetic.air import dust, fog
from ctta.synthetic.classes import Labels
from ctta.synthetic.dark import dusk, night
from ctta.synthetic.rng import SceneRNG
from ctta.synthetic.scene import Scene, drawn_scene
from ctta.synthetic.wet import rain, snow
from ctta.validation import check_choice, check_integer

Weather = Callable[[Scene, SceneRNG], Float32Array]

#: Raised whenever the same arguments give other pixels or labels: it is part of the hash of a stream.
VERSION = 1


def clear(scene: Scene, dice: SceneRNG) -> Float32Array:
    """The scene as it is."""
    return scene.clear


# The weather that is reported, in the paper's order, after the one to learn in.
CONDITIONS: dict[str, Weather] = {"clear": clear, "fog": fog, "night": night, "rain": rain, "snow": snow}

# Two more to choose hyperparameters in, so that the four stay unseen.
HOLD_OUT: dict[str, Weather] = {"dusk": dusk, "dust": dust}

#: Which weather each part of the scenes may be seen in. No scene of one part occurs in another.
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("clear",),
    "choose": ("clear", *HOLD_OUT),
    "report": tuple(CONDITIONS),
}
SMALLEST = 32  # pixels a side; below, nothing can be recognised


@dataclass(frozen=True)
class Frame:
    """A picture with its truth."""

    image: UInt8Array  # (H, W, 3)
    label: Labels  # (H, W), places in CLASSES
    distance: Float32Array  # (H, W), metres along each pixel's ray; the sky is infinitely far


def render_frame(
    index: int, condition: str = "clear", *, split: str = "report", seed: int = 0, size: tuple[int, int] = (128, 256)
) -> Frame:
    """One frame of the embedded street, a pure function of its arguments.

    Scene and labels depend on (seed, split, index, size) only, so every weather shows the same street.

    Args:
        index: the number of the scene, from 0; there is no last one.
        condition: "clear", "fog", "night", "rain" or "snow", or to choose settings in "dusk" or "dust".
        split: "train", "choose" or "report"; each has scenes of its own, and the weather that it may be seen in.
        seed: another seed, other streets.
        size: (height, width) in pixels.

    >>> foggy = render_frame(3, "fog")
    >>> foggy.image.shape, foggy.label.shape, bool((foggy.label == render_frame(3, "clear").label).all())
    ((128, 256, 3), (128, 256), True)
    """
    check_condition(condition, split)
    check_integer("seed", seed)
    index = check_integer("index", index, 0)
    height, width = validate_size(size)
    scene = drawn_scene(seed, split, index, height, width)
    colour = (CONDITIONS | HOLD_OUT)[condition](scene, SceneRNG(seed, f"{split} {condition}", index))
    np.clip(colour, 0, 1, out=colour)
    colour *= np.float32(255)
    image = np.rint(colour, out=colour).astype(np.uint8)
    return Frame(np.ascontiguousarray(image.transpose(1, 2, 0)), scene.label, scene.distance)


def check_condition(condition: str, split: str) -> None:
    """Whether there is such weather, and scenes to be seen in it."""
    check_choice("split", split, tuple(SPLITS))
    check_choice("condition", condition, (*CONDITIONS, *HOLD_OUT))
    if condition not in SPLITS[split]:
        meant = [name for name, conditions in SPLITS.items() if condition in conditions]
        raise ValueError(
            f"split {split!r} is seen in {', '.join(SPLITS[split])}, got {condition!r}: use split={meant[0]!r}, "
            "so that no setting is learnt or chosen on what is reported"
        )


def validate_size(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a picture, large enough."""
    if not isinstance(size, tuple) or len(size) != 2:
        raise ValueError(f"size must be (height, width), got {size!r}")
    return check_integer("height", size[0], SMALLEST), check_integer("width", size[1], SMALLEST)
