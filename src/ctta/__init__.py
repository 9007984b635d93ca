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
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctta import (
        benchmark,
        data,
        distributed,
        errors,
        evaluation,
        functional,
        guard,
        integrations,
        models,
        policies,
        serve,
        testing,
        views,
    )
    from ctta.advise import Advice, Certificate, advise, calibrate_gain, calibrate_threshold, certify
    from ctta.checkpoint.files import load, save
    from ctta.core.config import from_config
    from ctta.core.model import AdaptiveModel, MethodInfo
    from ctta.core.registry import adapt
    from ctta.core.steps import Step
    from ctta.errors import CheckpointError, ConfigError, DataError, InputError
    from ctta.evaluation import Comparison, Result, compare, evaluate
    from ctta.guard import Guarded
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
    from ctta.methods.petal import weight_posterior
    from ctta.methods.rmt.replay import SourceReplay
    from ctta.nn.surgery import fingerprint
    from ctta.optim import OptimizerFactory
    from ctta.source_stats import SourceStats, source_stats

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
    "Step",
    "Tent",
    "TestAug",
    "adapt",
    "advise",
    "benchmark",
    "calibrate_gain",
    "calibrate_threshold",
    "certify",
    "compare",
    "data",
    "distributed",
    "errors",
    "evaluate",
    "evaluation",
    "fingerprint",
    "from_config",
    "functional",
    "guard",
    "integrations",
    "load",
    "models",
    "policies",
    "save",
    "serve",
    "source_stats",
    "testing",
    "views",
    "weight_posterior",
]


#: The modules of public names that are neither methods nor submodules. Every name is imported when it is first used, so
#: that the command line can answer without torch, and ``import ctta`` takes no time until something is needed.
_MODULES = {
    "AdaptiveModel": "ctta.core.model",
    "Advice": "ctta.advise",
    "Certificate": "ctta.advise",
    "CheckpointError": "ctta.errors",
    "Comparison": "ctta.evaluation",
    "ConfigError": "ctta.errors",
    "DataError": "ctta.errors",
    "Guarded": "ctta.guard",
    "InputError": "ctta.errors",
    "METHODS": "ctta.methods",
    "MethodInfo": "ctta.core.model",
    "OptimizerFactory": "ctta.optim",
    "Result": "ctta.evaluation",
    "SourceReplay": "ctta.methods.rmt.replay",
    "SourceStats": "ctta.source_stats",
    "Step": "ctta.core.steps",
    "adapt": "ctta.core.registry",
    "advise": "ctta.advise",
    "calibrate_gain": "ctta.advise",
    "calibrate_threshold": "ctta.advise",
    "certify": "ctta.advise",
    "compare": "ctta.evaluation",
    "evaluate": "ctta.evaluation",
    "fingerprint": "ctta.nn.surgery",
    "from_config": "ctta.core.config",
    "load": "ctta.checkpoint.files",
    "save": "ctta.checkpoint.files",
    "source_stats": "ctta.source_stats",
    "weight_posterior": "ctta.methods.petal",
}


#: Public modules of version 0.2 that have moved. The old names work until version 0.4, with a DeprecationWarning.
_MOVED = {
    "advisor": "advise",
    "corruptions": "data.corruptions",
    "datasets": "data.datasets",
    "inference": "adapt",
    "registry": "core.registry",
    "report": "benchmark.report",
    "streams": "data.streams",
    "synthetic": "data.streets",
}


class _MovedModules(MetaPathFinder, Loader):
    """Import a module that has moved, or one below it, by its old name: both names are then the same module."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == __name__ and name.partition(".")[0] in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, _, rest = module.__name__.removeprefix("ctta.").partition(".")
        new = ".".join(["ctta", _MOVED[old], *([rest] if rest else [])])
        warnings.warn(f"{module.__name__} has moved to {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)


sys.meta_path.insert(0, _MovedModules())  # before the finder that would load a file below a moved package again


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
    elif name in _MOVED:
        value = importlib.import_module(f"ctta.{name}")
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in __all__ and name.islower():
        value = importlib.import_module(f"ctta.{name}")
    elif (value := _find_method(name)) is None:
        raise AttributeError(f"module 'ctta' has no attribute {name!r}")
    globals()[name] = value
    return value


def _find_method(name: str) -> Any:
    """Return the method whose class has this name, also of one that ``__all__`` does not list; None if none has."""
    if not name[:1].isupper():
        return None
    methods = importlib.import_module("ctta.methods").METHODS
    return next((cls for cls in methods.values() if cls.__name__ == name), None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
