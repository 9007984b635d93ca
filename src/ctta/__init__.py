"""Continual test-time adaptation: a network that keeps adapting, online and without labels.

>>> import torch, ctta
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> stream = [torch.rand(4, 3, 8, 8) for _ in range(2)]
>>> model = ctta.CoTTA(net)
>>> for x in stream:
...     logits = model(x)    # predicts and adapts
"""

from importlib.metadata import version

from ctta import (
    benchmark,
    corruptions,
    datasets,
    distributed,
    errors,
    functional,
    guard,
    models,
    streams,
    synthetic,
    testing,
    views,
)
from ctta.advise.threshold import calibrate_threshold
from ctta.base import AdaptiveModel, Step
from ctta.checkpoint.files import load, save
from ctta.checkpoint.fingerprint import fingerprint
from ctta.errors import CheckpointError, ConfigError, DataError, InputError
from ctta.evaluation.evaluate import evaluate
from ctta.evaluation.results import Result
from ctta.guard import Guarded
from ctta.methods import METHODS, BNStats, CoTTA, PseudoLabel, Source, Tent, TestAug, adapt
from ctta.optim import OptimizerFactory

__version__ = version("ctta")

__all__ = [
    "METHODS",
    "AdaptiveModel",
    "BNStats",
    "CheckpointError",
    "CoTTA",
    "ConfigError",
    "DataError",
    "Guarded",
    "InputError",
    "OptimizerFactory",
    "PseudoLabel",
    "Result",
    "Source",
    "Step",
    "Tent",
    "TestAug",
    "adapt",
    "benchmark",
    "calibrate_threshold",
    "corruptions",
    "datasets",
    "distributed",
    "errors",
    "evaluate",
    "fingerprint",
    "functional",
    "guard",
    "load",
    "models",
    "save",
    "streams",
    "synthetic",
    "testing",
    "views",
]
