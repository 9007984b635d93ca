"""Continual test-time adaptation: a network that keeps adapting, online and without labels.

>>> import torch, ctta
>>> net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 10))
>>> stream = [torch.rand(4, 3, 8, 8) for _ in range(2)]
>>> model = ctta.CoTTA(net)
>>> for x in stream:
...     logits = model(x)    # predicts and adapts
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctta import (
        advisor,
        benchmark,
        corruptions,
        datasets,
        distributed,
        errors,
        evaluation,
        functional,
        guard,
        inference,
        integrations,
        models,
        policies,
        registry,
        report,
        serve,
        streams,
        synthetic,
        testing,
        views,
    )
    from ctta.advisor import Advice, Certificate, advise, calibrate_gain, calibrate_threshold, certify
    from ctta.base import AdaptiveModel
    from ctta.checkpoint.files import load, save
    from ctta.checkpoint.library import StateLibrary
    from ctta.config import from_config
    from ctta.errors import CheckpointError, ConfigError, DataError, InputError
    from ctta.evaluation import Comparison, Result, compare, evaluate
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
        VANE,
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

    __version__: str

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
    "VANE",
    "AdaContrast",
    "AdaptiveModel",
    "Advice",
    "BNAlpha",
    "BNStats",
    "Certificate",
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
    "StateLibrary",
    "Step",
    "Tent",
    "TestAug",
    "adapt",
    "advise",
    "advisor",
    "benchmark",
    "calibrate_gain",
    "calibrate_threshold",
    "certify",
    "compare",
    "corruptions",
    "datasets",
    "distributed",
    "errors",
    "evaluate",
    "evaluation",
    "fingerprint",
    "from_config",
    "functional",
    "guard",
    "inference",
    "integrations",
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


#: The modules of public names that are neither methods nor submodules. Every name is imported when it is first used, so
#: that the command line can answer without torch, and ``import ctta`` takes no time until something is needed.
_MODULES = {
    "AdaptiveModel": "ctta.base",
    "Advice": "ctta.advisor",
    "Certificate": "ctta.advisor",
    "CheckpointError": "ctta.errors",
    "Comparison": "ctta.evaluation",
    "ConfigError": "ctta.errors",
    "DataError": "ctta.errors",
    "Guarded": "ctta.guard",
    "InputError": "ctta.errors",
    "MethodInfo": "ctta.method_info",
    "OptimizerFactory": "ctta.optim",
    "Result": "ctta.evaluation",
    "SourceReplay": "ctta.source_replay",
    "SourceStats": "ctta.source_stats",
    "Step": "ctta.steps",
    "adapt": "ctta.registry",
    "advise": "ctta.advisor",
    "calibrate_gain": "ctta.advisor",
    "calibrate_threshold": "ctta.advisor",
    "certify": "ctta.advisor",
    "compare": "ctta.evaluation",
    "evaluate": "ctta.evaluation",
    "fingerprint": "ctta.fingerprints",
    "from_config": "ctta.config",
    "StateLibrary": "ctta.checkpoint.library",
    "load": "ctta.checkpoint.files",
    "save": "ctta.checkpoint.files",
    "source_stats": "ctta.source_stats",
    "weight_posterior": "ctta.posterior",
}


class _Package(ModuleType):
    """A package in which a public function goes before a subpackage of the same name, whatever is imported first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("ctta")
    elif name not in __all__:
        raise AttributeError(f"module 'ctta' has no attribute {name!r}")
    elif name in _MODULES or name[0].isupper():
        value = getattr(importlib.import_module(_MODULES.get(name, "ctta.methods")), name)
    else:
        value = importlib.import_module(f"ctta.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
