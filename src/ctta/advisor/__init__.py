"""Whether adaptation helps a network, and which method and settings."""

from ctta.advisor.advice import Advice
from ctta.advisor.calibration import calibrate_gain
from ctta.advisor.certificate import Certificate, ScenarioOutcome
from ctta.advisor.influence import Influence, measure_influence
from ctta.advisor.input_check import InputCheck, check_input
from ctta.advisor.pictures import label_pictures
from ctta.advisor.race import Race, RaceRow
from ctta.advisor.recommendation import advise
from ctta.advisor.scenarios import certify
from ctta.advisor.threshold import calibrate_threshold
from ctta.advisor.trial import MethodTrial, try_methods

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
