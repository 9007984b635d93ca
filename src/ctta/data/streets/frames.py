"""Frames by index: a scene in one condition of weather and light, with its labels and distances."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctta.core.validation import check_choice, check_integer
from ctta.data.corruptions.arrays import Float32Array, UInt8Array
from ctta.data.streets.canvas import (
    CLASSES,
    GREEN_LIGHT,
    LANE,
    LIT_WINDOW,
    NO_LIGHT,
    PAVEMENT,
    RED_LIGHT,
    ROAD,
    SKY,
    STREET_LAMP,
    WHITE_LIGHT,
    Canvas,
    LabelMap,
    LightSource,
)
from ctta.data.streets.scene import render_scene
from ctta.data.streets.textures import SIDE, SceneRNG, draw_clouds, lookup_colors, rgb, sample_grain
from ctta.errors import ConfigError

VISIBLE_CONTRAST = 0.05  # contrast of a black object at the distance that is called visibility
RIPPLES = 5  # rows up and down over which a reflection is averaged
REFERENCE_PIXELS = 256 * 128  # image area that the numbers of drops and the radii of flakes are given for


def apply_haze(
    clear: Float32Array, distance: Float32Array, beta: float | Float32Array, airlight: Float32Array
) -> Float32Array:
    """Apply Koschmieder's law: I = J t + A (1 - t), where t = exp(-beta d).

    Args:
        clear: The image J without haze, (3, H, W).
        distance: The distance d in meters along each pixel's ray, (H, W); infinite for the sky.
        beta: Extinction coefficient per meter, one or one per pixel.
        airlight: The color A of the scattered light, (3, 1, 1).

    Returns:
        The hazy image I, (3, H, W).
    """
    transmission = np.exp(-beta * distance)
    hazy: Float32Array = airlight + transmission * (clear - airlight)
    return hazy


def extinction_coefficient(visibility: float) -> float:
    """Return the coefficient beta per meter for a visibility in meters."""
    return float(-np.log(VISIBLE_CONTRAST) / visibility)


def fog(scene: Canvas, rng: SceneRNG) -> Float32Array:
    """Render gray fog with a visibility of 25 to 70 meters."""
    airlight = rng.color((0.76, 0.78, 0.80), 0.08)
    return apply_haze(scene.clear, scene.distance, extinction_coefficient(rng.uniform(25, 70)), airlight)


def dust(scene: Canvas, rng: SceneRNG) -> Float32Array:
    """Render drifts of sand in the air: yellow light, and a visibility of 20 to 60 meters."""
    height, width = scene.label.shape
    airlight = rng.color((0.76, 0.58, 0.36), 0.06)
    drifts = draw_clouds(height, width, 90 / width, rng)
    beta = extinction_coefficient(rng.uniform(20, 60)) * (0.5 + drifts)
    # At the infinite distance of the sky, drifts could not be seen.
    distance = np.minimum(scene.distance, 400)
    dim = scene.overcast * rng.uniform(0.7, 0.9) * rgb(1.05, 0.95, 0.8)
    return apply_haze(dim, distance, beta, airlight * (0.85 + 0.3 * drifts))


def rain(scene: Canvas, rng: SceneRNG) -> Float32Array:
    """Render rain: streaks, a dark wet road with reflections, and flat gray light."""
    height, width = scene.label.shape
    color = desaturate(render_overcast(scene, rng.uniform(0.6, 0.8), rng), 0.7)
    _add_reflections_(color, scene, rng)
    airlight = rng.color((0.50, 0.53, 0.56), 0.05)
    color = apply_haze(color, scene.distance, extinction_coefficient(rng.uniform(90, 220)), airlight)
    # Streaks grow longer with the image but stay one pixel wide.
    num_streaks = rng.uniform(180, 420) * _relative_size(scene)
    layer = render_streaks(height, width, int(num_streaks), rng.uniform(-0.5, 0.5), rng)
    cover = np.minimum(layer * np.float32(rng.uniform(0.25, 0.45)), 0.6)
    color += cover * (np.float32(0.78) - color)
    return color


def _add_reflections_(color: Float32Array, scene: Canvas, rng: SceneRNG) -> None:
    """Darken the wet ground, in place, and add the mirror image of what is as far above the horizon as it is below."""
    camera = scene.camera
    first = camera.first_ground_row
    num_rows = camera.height - first
    if num_rows <= 0:
        return
    is_wet = np.isin(scene.label[first:], (ROAD, LANE, PAVEMENT))
    # Ripples smear the reflection vertically: each row is the mean of several.
    rows = 2 * camera.vanishing_row - first - np.arange(-RIPPLES, num_rows + RIPPLES)
    above = color[:, np.clip(rows, 0, first - 1).astype(np.int64)]
    sums = np.cumsum(np.insert(above, 0, 0, axis=1), axis=1)
    window = 2 * RIPPLES + 1
    reflection = (sums[:, window:] - sums[:, :-window]) / np.float32(window)
    z = camera.elevation / camera.v[first:]
    puddles = sample_grain(z * 1.5 + rng.uniform(0, SIDE), camera.u * z * 3 + 4 * SIDE)
    fresnel = 0.2 + 0.4 / (1 + 20 * camera.v[first:] ** 2)  # water reflects more at grazing angles
    fraction = np.clip(fresnel * (0.35 + 1.1 * puddles), 0, 0.6)
    wet = color[:, first:] * np.float32(rng.uniform(0.5, 0.65))
    np.copyto(color[:, first:], wet + fraction * (reflection - wet), where=is_wet)


def snow(scene: Canvas, rng: SceneRNG) -> Float32Array:
    """Render snow: flakes, white on every surface that snow settles on, and gray light."""
    height, width = scene.label.shape
    color = desaturate(render_overcast(scene, rng.uniform(0.8, 0.95), rng), 0.6)
    # Patches of snow, by position on the ground up to the depth of visible grain.
    z = np.minimum(scene.depth, np.float32(60))
    along, across = z * 3 + rng.uniform(0, SIDE), scene.camera.u * z * 3 + 4 * SIDE + scene.camera.v * 97
    drifts = sample_grain(along, across)
    amount = rng.uniform(0.18, 0.5)
    cover = np.clip((scene.snow * (0.7 + 0.6 * drifts) - (1 - amount)) * 3.5 + 0.5, 0, 0.93) * (scene.snow > 0)
    white = rgb(0.86, 0.88, 0.92) * (0.85 + 0.2 * drifts)
    color += cover * (white - color)
    airlight = rng.color((0.74, 0.76, 0.79), 0.05)
    color = apply_haze(color, scene.distance, extinction_coefficient(rng.uniform(70, 180)), airlight)
    scale = _relative_size(scene)
    layer = render_flakes(height, width, rng.integer(250, 600), 0.6 * scale, rng)
    layer += render_flakes(height, width, rng.integer(60, 160), 1.3 * scale, rng)
    layer += render_flakes(height, width, rng.integer(8, 30), 2.4 * scale, rng)
    color += np.minimum(layer, np.float32(0.9)) * (np.float32(0.95) - color)
    return color


def render_overcast(scene: Canvas, brightness: float, rng: SceneRNG) -> Float32Array:
    """Render the scene without sun, below a closed gray sky."""
    height, width = scene.label.shape
    clouds = draw_clouds(height, width, 80 / width, rng)
    color = scene.overcast * np.float32(brightness)
    tint = rng.color((0.70, 0.72, 0.75), 0.06) * np.float32(brightness)
    np.copyto(color, (0.85 + 0.3 * clouds) * tint, where=scene.label == SKY)
    return color


def desaturate(color: Float32Array, saturation: float) -> Float32Array:
    """Return the image with its saturation multiplied."""
    gray = to_gray(color)
    result: Float32Array = gray + np.float32(saturation) * (color - gray)
    return result


def to_gray(color: Float32Array) -> Float32Array:
    """Return the mean of the channels, (H, W)."""
    total: Float32Array = color[0] + color[1]
    total += color[2]
    total *= np.float32(1 / 3)
    return total


def _relative_size(scene: Canvas) -> float:
    """Return how much longer the sides of this image are than those of the reference."""
    height, width = scene.label.shape
    return math.sqrt(height * width / REFERENCE_PIXELS)


def render_streaks(height: int, width: int, count: int, slant: float, rng: SceneRNG) -> Float32Array:
    """Return a layer of rain: lines of one slant (columns per row), the nearer the longer and brighter."""
    start, nearness = rng.uniform_array(2, count, 1), rng.uniform_array(count, 1)
    max_length = max(4, height // 6)
    step = np.arange(max_length, dtype=np.float32)
    is_drawn = step < (0.3 + 0.7 * nearness) * max_length
    rows = start[0] * (height + max_length) - max_length + step
    columns = start[1] * (width + abs(slant) * height) - max(0.0, slant * height) + slant * rows
    return splat(height, width, rows, columns, np.where(is_drawn, 0.35 + 0.65 * nearness, np.float32(0)))


def render_flakes(height: int, width: int, count: int, radius: float, rng: SceneRNG) -> Float32Array:
    """Return a layer of snow: soft disks of one radius in pixels and random brightness."""
    reach = int(np.ceil(radius))
    offset = np.arange(-reach, reach + 1, dtype=np.float32)
    distance = np.sqrt(offset[:, None] ** 2 + offset**2).reshape(1, -1)
    down, across = np.repeat(offset, len(offset))[None], np.tile(offset, len(offset))[None]
    start, brightness = rng.uniform_array(2, count, 1), 0.5 + 0.5 * rng.uniform_array(count, 1)
    profile = np.clip(1.25 - distance / max(radius, 0.5), 0, 1)
    return splat(height, width, start[0] * height + down, start[1] * width + across, brightness * profile)


def splat(height: int, width: int, rows: Float32Array, columns: Float32Array, amounts: Float32Array) -> Float32Array:
    """Return a layer to which each amount is added at its pixel; those outside are dropped."""
    row, column = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    pixels = row[inside] * width + column[inside]
    layer = np.bincount(pixels, np.broadcast_to(amounts, row.shape)[inside], height * width)
    return layer.reshape(height, width).astype(np.float32)


#: The color of each value of `Canvas.light`.
LIGHT_COLORS = {
    NO_LIGHT: rgb(0, 0, 0),
    LIT_WINDOW: rgb(0.85, 0.65, 0.35),
    STREET_LAMP: rgb(1.0, 0.95, 0.8),
    WHITE_LIGHT: rgb(1.0, 0.95, 0.8),
    RED_LIGHT: rgb(1.0, 0.15, 0.1),
    GREEN_LIGHT: rgb(0.3, 1.0, 0.6),
}
LAMP_RADIUS = 4.5  # meters; sets the falloff of the light around a street lamp


def night(scene: Canvas, rng: SceneRNG) -> Float32Array:
    """Render the scene at night: headlights, lamps and windows, sensor noise and a color cast."""
    camera = scene.camera
    ambient = rng.color((0.11, 0.12, 0.17), 0.04)
    lamp_color = rng.color((1.0, 0.72, 0.38), 0.1) if rng.chance(0.7) else rng.color((0.8, 0.88, 1.0), 0.08)
    # The camera's own headlights: a low, wide cone that falls off with distance.
    beam = np.exp(-((camera.u / 0.42) ** 2)) * np.exp(-(((camera.v - 0.05) / 0.13) ** 2))
    beam = rng.uniform(0.9, 1.5) * beam / (1 + (np.minimum(scene.depth, 500) / 15) ** 2)
    lamps = [source for source in scene.light_sources if source.kind == STREET_LAMP and source.z < 45]
    lamplight = rng.uniform(0.6, 1.0) * compute_lamplight(scene, lamps)
    light = ambient + beam * rgb(1.0, 0.97, 0.88) + lamplight * lamp_color
    color = scene.overcast * light
    climb = np.clip(-camera.v / 0.5, 0, 1)
    sky = rng.color((0.05, 0.06, 0.10), 0.02) + (1 - climb) * 0.10 * lamp_color
    np.copyto(color, sky, where=scene.label == SKY)
    emission = lookup_colors(scene.light, [LIGHT_COLORS[kind] for kind in sorted(LIGHT_COLORS)])
    np.maximum(color, emission * np.float32(rng.uniform(0.7, 0.95)), out=color)
    for source in scene.light_sources:
        _add_glow_(color, scene, source, lamp_color)
    gain = rng.uniform(0.9, 1.25)
    noise = rng.normal_array(*color.shape)
    # Shot noise grows with the root of the light, on top of constant read noise.
    noise *= np.float32(0.05) * np.sqrt(np.clip(color, 0, 1)) + np.float32(0.018)
    noise += color * np.float32(gain)
    return noise


def compute_lamplight(scene: Canvas, lamps: list[LightSource]) -> Float32Array:
    """Return the light of street lamps on everything around them, (H, W)."""
    z = np.minimum(scene.depth, 500)
    x = scene.camera.u * z
    total = np.zeros(z.shape, np.float32)
    for lamp in lamps:
        squared_distance = (x - lamp.x) ** 2 + (z - lamp.z) ** 2
        total += 1 / (1 + squared_distance / np.float32(LAMP_RADIUS**2)) ** 2
    return np.minimum(total, 1.3)


def _add_glow_(color: Float32Array, scene: Canvas, source: LightSource, lamp_color: Float32Array) -> None:
    """Add the halo of a light, in place, unless something hides it."""
    camera = scene.camera
    row, column = camera.project_y(source.y, source.z), camera.project_x(source.x, source.z)
    height, width = scene.label.shape
    if not (0 <= row < height and 0 <= column < width):
        return
    if scene.depth[int(row), int(column)] < source.z - 0.5:
        return
    radius = max(0.012 * width, source.strength * 0.55 * camera.focal / source.z)
    reach = 3 * radius
    rows = slice(max(0, int(row - reach)), min(height, int(row + reach) + 1))
    columns = slice(max(0, int(column - reach)), min(width, int(column + reach) + 1))
    down = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + 0.5 - np.float32(row)
    across = np.arange(columns.start, columns.stop, dtype=np.float32) + 0.5 - np.float32(column)
    squared_distance = (down**2 + across**2) / np.float32(radius**2)
    halo = np.clip(1 / (1 + 4 * squared_distance) - 1 / 37, 0, 1)  # 0 at the end of its reach
    halo_color = lamp_color if source.kind == STREET_LAMP else LIGHT_COLORS[source.kind]
    color[:, rows, columns] += halo * halo_color * np.float32(0.8)


def dusk(scene: Canvas, rng: SceneRNG) -> Float32Array:
    """Render the scene against a low sun: an orange sky, glare, and dark objects."""
    camera = scene.camera
    from_sun = np.hypot(camera.u - rng.uniform(-0.5, 0.5), camera.v + rng.uniform(0.03, 0.2))
    climb = np.clip(-camera.v / 0.5, 0, 1)
    horizon, zenith = rng.color((0.95, 0.58, 0.30), 0.06), rng.color((0.34, 0.30, 0.48), 0.06)
    light = rng.uniform(0.32, 0.5) * rgb(1.12, 0.88, 0.82)
    # Backlight reduces the contrast of dark areas.
    color: Float32Array = (0.75 * scene.clear + 0.25 * scene.clear**2) * light
    clouds = to_gray(scene.clear) - np.float32(0.7)
    np.copyto(color, horizon + climb * (zenith - horizon) + 0.3 * clouds, where=scene.label == SKY)
    glare = rng.uniform(0.5, 0.8) * np.exp(-from_sun / 0.22) + 0.9 * np.exp(-((from_sun / 0.07) ** 2))
    color += glare * rgb(1.0, 0.78, 0.5)
    return color


Condition = Callable[[Canvas, SceneRNG], Float32Array]

#: Incremented whenever the same arguments give other pixels or labels: part of the hash of a stream.
VERSION = 1


def clear(scene: Canvas, rng: SceneRNG) -> Float32Array:
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
#: The classes of the objects that have boxes.
BOX_CLASSES = ("car", "person")
MIN_SIDE = 32  # pixels; below, nothing can be recognized


@dataclass(frozen=True)
class Frame:
    """An image with its ground truth.

    Attributes:
        image: uint8 (H, W, 3).
        label: Indices into ``CLASSES``, uint8 (H, W).
        distance: Meters along each pixel's ray, (H, W); infinite for the sky.
        instance: The number of the car or person at each pixel, uint16 (H, W); 0 elsewhere.
    """

    image: UInt8Array
    label: LabelMap
    distance: Float32Array
    instance: NDArray[np.uint16]

    def find_boxes(self, min_pixels: int = 40) -> tuple[Float32Array, NDArray[np.int64]]:
        """Return the boxes of the cars and people, each around what is visible of it.

        Args:
            min_pixels: Leave out objects of which fewer pixels are visible.

        Returns:
            Boxes (n, 4) as left, top, right, bottom in pixels, and their classes (n), indices into ``BOX_CLASSES``.

        >>> boxes, classes = render_frame(0).find_boxes()
        >>> len(boxes) == len(classes)
        True
        """
        rows, columns = self.instance.nonzero()
        numbers = self.instance[rows, columns]
        order = np.argsort(numbers, kind="stable")
        _, starts, counts = np.unique(numbers[order], return_index=True, return_counts=True)
        boxes, classes = [], []
        for start, count in zip(starts, counts, strict=True):
            if count >= min_pixels:
                at = order[start : start + count]
                y, x = rows[at], columns[at]
                boxes.append((x.min(), y.min(), x.max() + 1, y.max() + 1))
                classes.append(BOX_CLASSES.index(CLASSES[self.label[y[0], x[0]]]))
        return np.array(boxes, np.float32).reshape(-1, 4), np.array(classes, np.int64)


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
    pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
    return Frame(pixels, scene.label, scene.distance, scene.instance)


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
