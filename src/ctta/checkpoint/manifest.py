"""What a file says about a model beside its tensors, as JSON: how to build it, and its counters.

A model that contains others (a wrapper with the model inside it and a snapshot of that) is described with the
descriptions of these nested under ``"inside"``, by the name of the submodule.
"""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ctta.checkpoint.encoding import decode, encode, is_serializable
from ctta.core.model import AdaptiveModel
from ctta.io.python_files import is_from_python_file
from ctta.methods import METHODS
from ctta.optim import restore_state_, split_state

_FIELDS = {
    "method": str,
    "hyperparameters": dict,
    "give_on_load": list,
    "counters": dict,
    "frozen": bool,
    "optimizer": dict,
}
_OPTIMIZER = "optimizer."


class MissingArgumentError(ValueError):
    """Raised if ``load`` needs an argument that the file cannot hold; the message continues a sentence on the file."""


class UnknownArgumentError(TypeError):
    """Raised if ``load`` is given a hyperparameter that the method does not have: not the file's mistake."""


class InvalidArgumentError(Exception):
    """Raised if a class refuses a hyperparameter that ``load`` was given: not the file's mistake.

    Args:
        reason: What the constructor raised.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class _Wrapper:
    cls: type[AdaptiveModel]
    load_only: frozenset[str]
    renamed: Mapping[str, str]


_WRAPPERS: dict[str, _Wrapper] = {}
#: Packages that register wrappers when they are imported, by the names of these; imported for the files that need them.
_PROVIDERS = {"guarded": "ctta.guard", "guarded_detector": "ctta.guard.boxes"}
#: How the names of methods for detectors start.
_DETECTION = "detection."


def register_wrapper(
    name: str,
    cls: type[AdaptiveModel],
    *,
    load_only: Iterable[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Let files hold models of a class that takes another model as its first argument.

    Args:
        name: Name to store it under; part of the file format.
        cls: The class; its ``wrapped`` is the model that it takes.
        load_only: Arguments that are never stored, and that only the caller of ``load`` may give.
        renamed: Submodules that older files have under another name: the present names by those.
    """
    _WRAPPERS[name] = _Wrapper(cls, frozenset(load_only), renamed)


def _find_wrapper(name: object) -> _Wrapper | None:
    """Return the wrapper of a stored name; None if it is not one."""
    if isinstance(name, str) and name in _PROVIDERS:
        importlib.import_module(_PROVIDERS[name])
    return _WRAPPERS.get(name) if isinstance(name, str) else None


def rename_parts(description: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a description and tensors of a file with the names that the parts of a wrapper have now."""
    wrapper, inside = _find_wrapper(description.get("method")), description.get("inside")
    if wrapper is None or not isinstance(inside, dict):
        return description, tensors
    inside = {wrapper.renamed.get(name, name): part for name, part in inside.items()}
    parts = (name.partition(".") for name in tensors)
    names = [f"{wrapper.renamed.get(part, part)}{dot}{rest}" for part, dot, rest in parts]
    return description | {"inside": inside}, dict(zip(names, tensors.values(), strict=True))


def describe(model: AdaptiveModel) -> dict[str, Any]:
    """Return the description of a model, from which :func:`build` and :func:`restore_` make it anew."""
    settings = model.hyperparameters
    description = {
        "method": _stored_name(type(model)),
        "hyperparameters": {name: encode(value) for name, value in settings.items() if is_serializable(value)},
        "give_on_load": [name for name, value in settings.items() if not is_serializable(value)],
        "counters": model.counters,
        "frozen": model.frozen,
        "optimizer": {} if model.optimizer is None else split_state(model.optimizer)[0],
    }
    if children := _children(model):
        description["inside"] = {name: describe(child) for name, child in children.items()}
    return description


def invalid_fields(description: dict[str, Any]) -> list[str]:
    """Return the names of the fields that are missing or of a wrong type."""
    invalid = [key for key, kind in _FIELDS.items() if not isinstance(description.get(key), kind)]
    inside = description.get("inside", {})
    if not isinstance(inside, dict) or (_find_wrapper(description.get("method")) and "wrapped" not in inside):
        return [*invalid, "inside"]
    for name, part in inside.items():
        invalid += [f"inside.{name}.{key}" for key in invalid_fields(part if isinstance(part, dict) else {})]
    return invalid


def build(
    description: dict[str, Any], net: nn.Module, method: type[AdaptiveModel] | None, given: dict[str, Any]
) -> AdaptiveModel:
    """Return the described model as new.

    Args:
        description: Made by :func:`describe`.
        net: The source network.
        method: The class, if it is not one of this library's; for a wrapper that of the model inside.
        given: Hyperparameters of the wrapper and of the model inside that replace or complete the stored ones.
    """
    wrapper = _find_wrapper(description["method"])
    if wrapper is None:
        cls = _resolve_class(description["method"], method)
        return _construct(cls, net, description, given)
    if forbidden := wrapper.load_only & description["hyperparameters"].keys():
        raise ValueError(f"it sets {', '.join(sorted(forbidden))}, which only the caller of load() may set")
    own = {name: value for name, value in given.items() if name in inspect.signature(wrapper.cls).parameters}
    rest = {name: value for name, value in given.items() if name not in own}
    wrapped = build(description["inside"]["wrapped"], net, None if method is wrapper.cls else method, rest)
    return _construct(wrapper.cls, wrapped, description, own)


def restore_(
    model: AdaptiveModel, description: dict[str, Any], tensors: dict[str, Tensor], given: dict[str, Any]
) -> None:
    """Give a new model the counters, the mode and the optimizer states of the described one."""
    model.frozen = description["frozen"]
    _restore_part_(model, "", description, tensors, given)


def _restore_part_(
    model: AdaptiveModel, prefix: str, description: dict[str, Any], tensors: dict[str, Tensor], given: dict[str, Any]
) -> None:
    for name, value in description["counters"].items():
        if name not in model.counters or type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"it sets the counter {name!r} to {value!r}, which the model cannot have")
        setattr(model, name, value)
    if model.optimizer is not None and "optimizer" not in given.keys() & description["hyperparameters"].keys():
        start = prefix + _OPTIMIZER
        state = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        learning_rates = [group.get("lr") for group in model.optimizer.param_groups]
        restore_state_(model.optimizer, description["optimizer"], state)
        if given.get("lr") is not None:  # the momenta stay
            for group, lr in zip(model.optimizer.param_groups, learning_rates, strict=True):
                group["lr"] = lr
    inside, children = description.get("inside", {}), _children(model)
    if inside.keys() != children.keys():
        raise ValueError(f"it holds models {sorted(inside)} inside, and the model has {sorted(children)}")
    for name, child in children.items():
        _restore_part_(child, f"{prefix}{name}.", inside[name], tensors, given)


def optimizer_tensors(model: AdaptiveModel) -> dict[str, Tensor]:
    """Return the tensors of every optimizer of a model and those inside it, by names that no weight has."""
    return {
        f"{prefix}{_OPTIMIZER}{name}": value
        for prefix, part in nested_models(model)
        if part.optimizer is not None
        for name, value in split_state(part.optimizer)[1].items()
    }


def nested_models(model: AdaptiveModel, prefix: str = "") -> Iterator[tuple[str, AdaptiveModel]]:
    """Yield a model and those inside it, each with the prefix that its tensors have in the outer ``state_dict``."""
    yield prefix, model
    for name, child in _children(model).items():
        yield from nested_models(child, f"{prefix}{name}.")


def split_name(name: str, prefixes: list[str]) -> tuple[str, str]:
    """Split a tensor's name into the submodule of the nested model that it belongs to, and its name within that.

    Args:
        name: Name in the outer ``state_dict``.
        prefixes: Those of :func:`nested_models`.

    >>> split_name("wrapped.student.bn.weight", ["", "wrapped.", "last_good."])
    ('student', 'bn.weight')
    """
    prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len)
    submodule, _, rest = name.removeprefix(prefix).partition(".")
    return submodule, rest


def unserializable_arguments(model: AdaptiveModel) -> dict[str, Any]:
    """Return the arguments that ``load`` needs for a file of this model: its class, and what a file cannot hold."""
    own = {name: value for name, value in model.hyperparameters.items() if not is_serializable(value)}
    return {"method": type(model), **own} if model.wrapped is None else own | unserializable_arguments(model.wrapped)


def _children(model: AdaptiveModel) -> dict[str, AdaptiveModel]:
    return {name: child for name, child in model.named_children() if isinstance(child, AdaptiveModel)}


def _methods_like(name: str) -> Mapping[str, type[AdaptiveModel]]:
    """Return the library's methods by stored name, of the kind that a name is of."""
    if not name.startswith(_DETECTION):
        return METHODS
    from ctta.detection.registry import DETECTION_METHODS  # only for files that need them

    return {f"{_DETECTION}{name}": cls for name, cls in DETECTION_METHODS.items()}


def _stored_name(cls: type[AdaptiveModel]) -> str:
    is_for_detectors = cls.__module__.startswith(f"ctta.{_DETECTION}")
    names = {method: name for name, method in _methods_like(_DETECTION if is_for_detectors else "").items()}
    names |= {wrapper.cls: name for name, wrapper in _WRAPPERS.items()}
    if cls not in names and is_from_python_file(cls):
        return _name_in_file(cls)  # without the folder, so that the file may move
    return names.get(cls, f"{cls.__module__}.{cls.__qualname__}")


def _name_in_file(cls: type) -> str:
    """Return the name of a class within its file, such as ``file:mine.py:Mine``."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return f"file:{Path(file).name}:{cls.__qualname__}"


def _resolve_class(name: str, given: type[AdaptiveModel] | None) -> type[AdaptiveModel]:
    """Return the class of a stored name; code outside of this library runs only if the caller has named it."""
    if given is None and name in (methods := _methods_like(name)):
        return methods[name]
    if given is None:
        raise MissingArgumentError(
            f"was saved by {name}, which is not part of ctta: give its class or name, load(path, net, method=...) "
            "or --method"
        )
    if name not in _names_of(given):
        raise MissingArgumentError(f"was saved by {name}, not by {_stored_name(given)}")
    return given


def _names_of(cls: type[AdaptiveModel]) -> set[str]:
    """Return the names that a class is stored under: its file can be imported as a module, and loaded as a file."""
    if (name := _stored_name(cls)) in _methods_like(name):
        return {name}
    in_file = _name_in_file(cls)
    stem = in_file.split(":")[1].removesuffix(".py")
    return {_stored_name(cls), in_file, f"{stem}.{cls.__qualname__}"}


def _construct(
    cls: type[AdaptiveModel], first: nn.Module, description: dict[str, Any], given: dict[str, Any]
) -> AdaptiveModel:
    """Return an object of a class from the stored and the given arguments; InvalidArgumentError if the latter fail."""
    arguments = _arguments(cls, description, given)
    try:
        return cls(first, **arguments)
    except Exception as error:  # whoever is to blame decides what the caller gets
        if given and (_is_refused(cls, first, given) or not _is_refused(cls, first, _stored(description, {}))):
            raise InvalidArgumentError(error) from error
        raise


def _is_refused(cls: type[AdaptiveModel], first: nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether a class does not take these arguments, with its defaults for all others."""
    try:
        cls(first, **arguments)
    except Exception:
        return True
    return False


def _stored(description: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the stored hyperparameters that are not given."""
    return {name: decode(code) for name, code in description["hyperparameters"].items() if name not in given}


def _arguments(cls: type[AdaptiveModel], description: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments from the stored and the given ones."""
    # Checked against the class and not the file, which may be older than some hyperparameters.
    if unknown := given.keys() - set(inspect.signature(cls).parameters):
        raise UnknownArgumentError(f"{description['method']} has no hyperparameter {', '.join(sorted(unknown))}")
    if missing := [name for name in description["give_on_load"] if name not in given]:
        again = ", ".join(f"{name}=..." for name in missing)
        raise MissingArgumentError(f"cannot hold every argument of the model; give again: load(path, net, {again})")
    return _stored(description, given) | given
