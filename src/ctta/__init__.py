"""Continual test-time adaptation: a network that keeps adapting, online and without labels.

>>> import torch, ctta
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> stream = [torch.rand(4, 3, 8, 8) for _ in range(2)]
>>> model = ctta.CoTTA(net)
>>> for x in stream:
...     logits = model(x)    # predicts and adapts
"""

from importlib.metadata import version

from ctta import corruptions, data, distributed, functional, guard, models, streams, streets, testing, views
from ctta.base import AdaptiveModel, Step
from ctta.calibration import calibrate_threshold
from ctta.checkpoint import CheckpointError, load, save
from ctta.evaluation import evaluate
from ctta.fingerprint import fingerprint
from ctta.guard import Guarded
from ctta.learning import OptimizerFactory
from ctta.methods import METHODS, BNStats, CoTTA, PseudoLabel, Source, Tent, TestAug, adapt
from ctta.results import Result

__version__ = version("ctta")

__all__ = [
    "METHODS",
    "AdaptiveModel",
    "BNStats",
    "CheckpointError",
    "CoTTA",
    "Guarded",
    "OptimizerFactory",
    "PseudoLabel",
    "Result",
    "Source",
    "Step",
    "Tent",
    "TestAug",
    "adapt",
    "calibrate_threshold",
    "corruptions",
    "data",
    "distributed",
    "evaluate",
    "fingerprint",
    "functional",
    "guard",
    "load",
    "models",
    "save",
    "streams",
    "streets",
    "testing",
    "views",
]
