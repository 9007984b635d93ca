"""Choose a method and its settings for a network."""

from ctta.advise.threshold import calibrate_threshold
from ctta.advise.tuning import Trial, Tuner

__all__ = ["Trial", "Tuner", "calibrate_threshold"]
