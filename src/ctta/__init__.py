"""Continual test-time adaptation: a network that keeps adapting, online and without labels.

>>> import torch, ctta
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> stream = [torch.rand(4, 3, 8, 8) for _ in range(2)]
>>> model = ctta.CoTTA(net)
>>> for x in stream:
...     logits = model(x)    # predicts and adapts
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ctta import errors, functional, guard, models, policies, registry, views
from ctta.base import AdaptiveModel
from ctta.checkpoint.files import load, save
from ctta.errors import CheckpointError, ConfigError, DataError, InputError
from ctta.fingerprints import fingerprint
from ctta.guard import Guarded
from ctta.method_info import MethodInfo
from ctta.methods import (
    BNEMA,
    CMF,
    DELTA,
    EATA,
    ETA,
    FOA,
    LAME,
    MEMO,
    METHODS,
    NOTE,
    PALM,
    PETAL,
    REM,
    RMT,
    ROID,
    RPL,
    SANTA,
    SAR,
    SHOTIM,
    SLR,
    T3A,
    TEA,
    TRIBE,
    AdaContrast,
    BNAlpha,
    BNStats,
    CoTTA,
    DeYO,
    PeTTA,
    PseudoLabel,
    RDumb,
    RoTTA,
    SoTTA,
    Source,
    Tent,
    TestAug,
)
from ctta.optim import OptimizerFactory
from ctta.posterior import weight_posterior
from ctta.registry import adapt
from ctta.source_replay import SourceReplay
from ctta.source_stats import SourceStats, source_stats
from ctta.steps import Step

if TYPE_CHECKING:
    from ctta import (
        advise,
        benchmark,
        corruptions,
        datasets,
        distributed,
        evaluation,
        inference,
        report,
        serve,
        streams,
        synthetic,
        testing,
    )
    from ctta.advise import calibrate_threshold
    from ctta.evaluation import Comparison, Result, compare, evaluate

__version__ = version("ctta")

__all__ = [
    "BNEMA",
    "CMF",
    "DELTA",
    "EATA",
    "ETA",
    "FOA",
    "LAME",
    "MEMO",
    "METHODS",
    "NOTE",
    "PALM",
    "PETAL",
    "REM",
    "RMT",
    "ROID",
    "RPL",
    "SANTA",
    "SAR",
    "SHOTIM",
    "SLR",
    "T3A",
    "TEA",
    "TRIBE",
    "AdaContrast",
    "AdaptiveModel",
    "BNAlpha",
    "BNStats",
    "CheckpointError",
    "CoTTA",
    "Comparison",
    "ConfigError",
    "DataError",
    "DeYO",
    "Guarded",
    "InputError",
    "MethodInfo",
    "OptimizerFactory",
    "PeTTA",
    "PseudoLabel",
    "RDumb",
    "Result",
    "RoTTA",
    "SoTTA",
    "Source",
    "SourceReplay",
    "SourceStats",
    "Step",
    "Tent",
    "TestAug",
    "adapt",
    "advise",
    "benchmark",
    "calibrate_threshold",
    "compare",
    "corruptions",
    "datasets",
    "distributed",
    "errors",
    "evaluate",
    "evaluation",
    "fingerprint",
    "functional",
    "guard",
    "inference",
    "load",
    "models",
    "policies",
    "registry",
    "report",
    "save",
    "serve",
    "source_stats",
    "streams",
    "synthetic",
    "testing",
    "views",
    "weight_posterior",
]


#: Names that are imported on first use, so that ``import ctta`` stays quick, and the packages that define them.
_LAZY = {
    "Comparison": "ctta.evaluation",
    "Result": "ctta.evaluation",
    "calibrate_threshold": "ctta.advise",
    "compare": "ctta.evaluation",
    "evaluate": "ctta.evaluation",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in __all__:
        return importlib.import_module(f"ctta.{name}")
    raise AttributeError(f"module 'ctta' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
