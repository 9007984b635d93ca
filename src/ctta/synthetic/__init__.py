"""The embedded street: driving scenes of our own with exact labels, in several kinds of weather.

Everything is drawn from numbers, nothing is stored: houses, trees, cars and people stand in a world measured in metres,
each pixel knows what it shows and how far that is, and weather is laid over it.
"""

from ctta.synthetic.air import apply_haze
from ctta.synthetic.classes import CLASSES, PALETTE
from ctta.synthetic.frames import CONDITIONS, HOLD_OUT, SPLITS, VERSION, Frame, render_frame

__all__ = ["CLASSES", "CONDITIONS", "HOLD_OUT", "PALETTE", "SPLITS", "VERSION", "Frame", "apply_haze", "render_frame"]
