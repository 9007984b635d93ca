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
    # Beside the methods, those of _SUBMODULES and _MODULES, for type checkers, which do not run this file.
    from ctta import benchmark as benchmark
    from ctta import data as data
    from ctta import detection as detection
    from ctta import distributed as distributed
    from ctta import errors as errors
    from ctta import evaluation as evaluation
    from ctta import functional as functional
    from ctta import guard as guard
    from ctta import integrations as integrations
    from ctta import models as models
    from ctta import policies as policies
    from ctta import serve as serve
    from ctta import testing as testing
    from ctta import views as views
    from ctta.advise import Advice as Advice
    from ctta.advise import Certificate as Certificate
    from ctta.advise import advise as advise
    from ctta.advise import calibrate_threshold as calibrate_threshold
    from ctta.advise import certify as certify
    from ctta.checkpoint.files import load as load
    from ctta.checkpoint.files import save as save
    from ctta.core.config import from_config as from_config
    from ctta.core.hyperparameters import CommonArguments as CommonArguments
    from ctta.core.model import AdaptiveModel as AdaptiveModel
    from ctta.core.model import MethodInfo as MethodInfo
    from ctta.core.registry import adapt as adapt
    from ctta.core.updates import Step as Step
    from ctta.detection.registry import detect as detect
    from ctta.errors import CheckpointError as CheckpointError
    from ctta.errors import ConfigError as ConfigError
    from ctta.errors import DataError as DataError
    from ctta.errors import InputError as InputError
    from ctta.evaluation import Comparison as Comparison
    from ctta.evaluation import Result as Result
    from ctta.evaluation import compare as compare
    from ctta.evaluation import evaluate as evaluate
    from ctta.guard import Guarded as Guarded
    from ctta.methods import *  # noqa: F403
    from ctta.methods import METHODS as METHODS
    from ctta.methods.petal import weight_posterior as weight_posterior
    from ctta.methods.rmt.replay import SourceReplay as SourceReplay
    from ctta.models.zero_shot import zero_shot as zero_shot
    from ctta.nn.surgery import fingerprint as fingerprint
    from ctta.optim import OptimizerFactory as OptimizerFactory
    from ctta.source_stats import SourceStats as SourceStats
    from ctta.source_stats import source_stats as source_stats

    __version__: str

_SUBMODULES = (
    "benchmark",
    "data",
    "detection",
    "distributed",
    "errors",
    "evaluation",
    "functional",
    "guard",
    "integrations",
    "models",
    "policies",
    "serve",
    "testing",
    "views",
)

#: The modules of public names that are neither methods nor submodules. Every name is imported when it is first used, so
#: that the command line can answer without torch, and ``import ctta`` takes no time until something is needed.
_MODULES = {
    "AdaptiveModel": "ctta.core.model",
    "Advice": "ctta.advise",
    "Certificate": "ctta.advise",
    "CheckpointError": "ctta.errors",
    "CommonArguments": "ctta.core.hyperparameters",
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
    "Step": "ctta.core.updates",
    "adapt": "ctta.core.registry",
    "advise": "ctta.advise",
    "calibrate_threshold": "ctta.advise",
    "certify": "ctta.advise",
    "compare": "ctta.evaluation",
    "detect": "ctta.detection.registry",
    "evaluate": "ctta.evaluation",
    "fingerprint": "ctta.nn.surgery",
    "from_config": "ctta.core.config",
    "load": "ctta.checkpoint.files",
    "save": "ctta.checkpoint.files",
    "source_stats": "ctta.source_stats",
    "weight_posterior": "ctta.methods.petal",
    "zero_shot": "ctta.models.zero_shot",
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


def _warn_moved(old: str, new: str) -> None:
    """Warn the code that uses an old name; as an attribute, the new one may be hidden by a function of its name."""
    warnings.warn(f"{old} has moved: use 'from {new} import ...'", DeprecationWarning, stacklevel=3)


class _MovedModules(MetaPathFinder, Loader):
    """Import a module that has moved, or one below it, by its old name: both names are then the same module."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == __name__ and name.partition(".")[0] in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, _, rest = module.__name__.removeprefix("ctta.").partition(".")
        new = ".".join(["ctta", _MOVED[old], *([rest] if rest else [])])
        _warn_moved(module.__name__, new)
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
        new = f"ctta.{_MOVED[name]}"
        _warn_moved(f"ctta.{name}", new)
        value = importlib.import_module(new)
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"ctta.{name}")
    elif name == "__all__":
        return sorted({*_MODULES, *_SUBMODULES, *_list_methods()})
    elif not name[:1].isupper() or (value := _list_methods().get(name)) is None:
        raise AttributeError(f"module 'ctta' has no attribute {name!r}")
    globals()[name] = value
    return value


def _list_methods() -> dict[str, Any]:
    """Return the methods by the names of their classes."""
    return {cls.__name__: cls for cls in importlib.import_module("ctta.methods").METHODS.values()}


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), "__version__"})
