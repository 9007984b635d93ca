"""Find out whether adaptation helps a network, with which method and settings, and certify that it does not harm."""

from ctta.advise.advice import Advice, advise
from ctta.advise.calibration import calibrate_threshold
from ctta.advise.certificate import Certificate, ScenarioOutcome, certify
from ctta.advise.images import label_images
from ctta.advise.influence import Influence, measure_influence
from ctta.advise.input_check import InputCheck, check_input
from ctta.advise.race import Race, RaceRow

__all__ = [
    "Advice",
    "Certificate",
    "Influence",
    "InputCheck",
    "Race",
    "RaceRow",
    "ScenarioOutcome",
    "advise",
    "calibrate_threshold",
    "certify",
    "check_input",
    "label_images",
    "measure_influence",
]
