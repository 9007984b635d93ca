"""Choose a method's settings for a network."""

from ctta.advise.threshold import calibrate_threshold

__all__ = ["calibrate_threshold"]
