"""What falls: streaks of rain and flakes of snow, scattered over a layer in one go."""

import numpy as np

from ctta.corruptions.arrays import Float32Array
from ctta.synthetic.rng import SceneRNG


def scattered(
    height: int, width: int, rows: Float32Array, columns: Float32Array, amounts: Float32Array
) -> Float32Array:
    """A layer with an amount at each place, those outside dropped, those that meet added up."""
    row, column = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    within = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    places = row[within] * width + column[within]
    layer = np.bincount(places, np.broadcast_to(amounts, row.shape)[within], height * width)
    return layer.reshape(height, width).astype(np.float32)


def streaks(height: int, width: int, count: int, slant: float, dice: SceneRNG) -> Float32Array:
    """Rain: lines of one slant (columns per row); the longer, the nearer and brighter."""
    start, nearness = dice.uniform(2, count, 1), dice.uniform(count, 1)
    longest = max(4, height // 6)
    step = np.arange(longest, dtype=np.float32)
    drawn = step < (0.3 + 0.7 * nearness) * longest
    rows = start[0] * (height + longest) - longest + step
    columns = start[1] * (width + abs(slant) * height) - max(0.0, slant * height) + slant * rows
    return scattered(height, width, rows, columns, np.where(drawn, 0.35 + 0.65 * nearness, np.float32(0)))


def flakes(height: int, width: int, count: int, radius: float, dice: SceneRNG) -> Float32Array:
    """Snow: soft discs of one radius in pixels, each of its own brightness."""
    reach = int(np.ceil(radius))
    offset = np.arange(-reach, reach + 1, dtype=np.float32)
    away = np.sqrt(offset[:, None] ** 2 + offset**2).reshape(1, -1)
    down, across = np.repeat(offset, len(offset))[None], np.tile(offset, len(offset))[None]
    start, bright = dice.uniform(2, count, 1), 0.5 + 0.5 * dice.uniform(count, 1)
    profile = np.clip(1.25 - away / max(radius, 0.5), 0, 1)
    return scattered(height, width, start[0] * height + down, start[1] * width + across, bright * profile)
