"""Whether adaptation helps a network, and which method and settings."""

from ctta.advise.advice import Advice
from ctta.advise.calibration import calibrate_gain
from ctta.advise.certificate import Certificate, ScenarioOutcome
from ctta.advise.influence import Influence, measure_influence
from ctta.advise.input_check import InputCheck, check_input
from ctta.advise.pictures import label_pictures
from ctta.advise.race import Race, RaceRow
from ctta.advise.recommendation import advise
from ctta.advise.scenarios import certify
from ctta.advise.threshold import calibrate_threshold
from ctta.advise.trial import MethodTrial, try_methods

__all__ = [
    "Advice",
    "Certificate",
    "Influence",
    "InputCheck",
    "MethodTrial",
    "Race",
    "RaceRow",
    "ScenarioOutcome",
    "advise",
    "calibrate_gain",
    "calibrate_threshold",
    "certify",
    "check_input",
    "label_pictures",
    "measure_influence",
    "try_methods",
]
