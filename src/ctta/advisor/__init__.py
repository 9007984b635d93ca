"""Whether adaptation helps a network, and which method and settings."""

from ctta.advisor.advice import Advice
from ctta.advisor.advise import advise
from ctta.advisor.input_check import InputCheck, check_input
from ctta.advisor.pictures import label_pictures
from ctta.advisor.race import Race, RaceRow
from ctta.advisor.threshold import calibrate_threshold
from ctta.advisor.trial import MethodTrial, try_methods

__all__ = [
    "Advice",
    "InputCheck",
    "MethodTrial",
    "Race",
    "RaceRow",
    "advise",
    "calibrate_threshold",
    "check_input",
    "label_pictures",
    "try_methods",
]
