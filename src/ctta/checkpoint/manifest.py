"""What a file says of a model beside its tensors, as JSON: how it is built anew, and what it has counted.

A guarded method is described as its name and arguments, with the method inside and its last good snapshot nested.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ctta.base import AdaptiveModel
from ctta.checkpoint.encoding import decode, encode, is_storable
from ctta.guard import Guarded
from ctta.hyperparameters import format_hyperparameters, format_value
from ctta.methods import METHODS
from ctta.optim import restore_state_, split_state

FIELDS = {
    "method": str,
    "hyperparameters": dict,
    "give_on_load": list,
    "counters": dict,
    "frozen": bool,
    "optimizer": dict,
}
GUARDED = "guarded"
INSIDE = ("inner", "good")  # the models inside a guarded one
OPTIMIZER = "optimizer."


class NotGivenError(ValueError):
    """Something that a file cannot hold has to be given, or given otherwise; the sentence continues one on the file."""


class UnknownSettingError(TypeError):
    """A setting was given that the method does not have: a slip of whoever loads, and no fault of the file."""


def describe(model: AdaptiveModel) -> dict[str, Any]:
    """All of :data:`FIELDS`, and for a guarded model those of the models inside."""
    settings = model.hyperparameters
    description = {
        "method": _name_of(type(model)),
        "hyperparameters": {name: encode(value) for name, value in settings.items() if is_storable(value)},
        "give_on_load": [name for name, value in settings.items() if not is_storable(value)],
        "counters": model.counters,
        "frozen": model.frozen,
        "optimizer": {} if model.optimizer is None else split_state(model.optimizer)[0],
    }
    if isinstance(model, Guarded):
        description["inside"] = {name: describe(getattr(model, name)) for name in INSIDE}
    return description


def optimizer_tensors(model: AdaptiveModel) -> dict[str, Tensor]:
    """Those of every optimiser, by names that no weight has."""
    return {
        f"{prefix}{OPTIMIZER}{name}": value
        for prefix, part in _models_in(model)
        if part.optimizer is not None
        for name, value in split_state(part.optimizer)[1].items()
    }


def unusable_fields(description: dict[str, Any]) -> list[str]:
    """What is missing or of a wrong kind."""
    wrong = [key for key, kind in FIELDS.items() if not isinstance(description.get(key), kind)]
    if wrong or description["method"] != GUARDED:
        return wrong
    inside = description.get("inside")
    if not isinstance(inside, dict) or any(not isinstance(inside.get(name), dict) for name in INSIDE):
        return ["inside"]
    if any(inside[name].get("method") == GUARDED for name in INSIDE):  # a guard has no guard inside
        return ["inside.method"]
    return [f"inside.{name}.{key}" for name in INSIDE for key in unusable_fields(inside[name])]


def build(
    description: dict[str, Any], net: nn.Module, method: type[AdaptiveModel] | None, given: dict[str, Any]
) -> AdaptiveModel:
    """The model as new; a ``method`` is the class of the one inside where that is guarded."""
    if description["method"] == GUARDED:
        if "audit" in description["hyperparameters"]:
            raise ValueError("it says where to write an audit log, which is for whoever loads it to say")
        of_guard = {name: value for name, value in given.items() if name in inspect.signature(Guarded).parameters}
        rest = {name: value for name, value in given.items() if name not in of_guard}
        inner = build(description["inside"]["inner"], net, None if method is Guarded else method, rest)
        return Guarded(inner, **_arguments(Guarded, description, of_guard))
    cls = _class_for(description["method"], method)
    return cls(net, **_arguments(cls, description, given))


def restore(
    model: AdaptiveModel, description: dict[str, Any], tensors: dict[str, Tensor], given: dict[str, Any]
) -> None:
    """Give a new model the counters, the mode and the optimisers' state of the described one."""
    model.frozen = description["frozen"]
    for prefix, part in _models_in(model):
        of_part = description["inside"][prefix.removesuffix(".")] if prefix else description
        _set_counters(part, of_part["counters"])
        if part.optimizer is not None and "optimizer" not in given.keys() & of_part["hyperparameters"].keys():
            start = prefix + OPTIMIZER
            state = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            restore_state_(part.optimizer, of_part["optimizer"], state)


def to_give_again(model: AdaptiveModel) -> dict[str, Any]:
    """The arguments with which a file of this very model can be loaded: its class, and what a file cannot hold."""
    parts = [model, model.inner] if isinstance(model, Guarded) else [model]
    given = {key: value for part in parts for key, value in part.hyperparameters.items() if not is_storable(value)}
    return {"method": type(parts[-1]), **given}


def shown_settings(model: AdaptiveModel) -> dict[str, str]:
    """Every hyperparameter as one would type it; that of a guard which is the method inside, with its own."""
    settings = {name: format_value(value) for name, value in model.hyperparameters.items()}
    if isinstance(model, Guarded):
        inside = format_hyperparameters(model.inner.hyperparameters)
        settings["model"] = f"{type(model.inner).__name__}({inside})"
    return settings


def is_of_optimizer(name: str) -> bool:
    """Whether a tensor of this name is one of :func:`optimizer_tensors`."""
    return name.startswith((OPTIMIZER, *(f"{part}.{OPTIMIZER}" for part in INSIDE)))


def name_in_source(name: str) -> str:
    """How the tensor of this name, in a network of a model, is called in the source."""
    for part in INSIDE:
        name = name.removeprefix(f"{part}.")
    return name.partition(".")[2]


def _models_in(model: AdaptiveModel) -> Iterator[tuple[str, AdaptiveModel]]:
    yield "", model
    if isinstance(model, Guarded):
        for name in INSIDE:
            yield f"{name}.", getattr(model, name)


def _name_of(method: type[AdaptiveModel]) -> str:
    own = {cls: name for name, cls in METHODS.items()} | {Guarded: GUARDED}
    return own.get(method, f"{method.__module__}.{method.__qualname__}")


def _class_for(name: str, given: type[AdaptiveModel] | None) -> type[AdaptiveModel]:
    if given is None and name in METHODS:
        return METHODS[name]
    if given is None:
        raise NotGivenError(f"was saved by {name}, which is not of this library: load(path, net, method=...)")
    if _name_of(given) != name:
        raise NotGivenError(f"was saved by {name}, not by {_name_of(given)}")
    return given


def _arguments(method: type[AdaptiveModel], description: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The constructor's: what the file could not hold must be given, and nothing that the method does not know."""
    # By the class and not by the file, which may be older than some of its settings.
    if unknown := given.keys() - set(inspect.signature(method).parameters):
        raise UnknownSettingError(f"{description['method']} has no hyperparameter {', '.join(sorted(unknown))}")
    if missing := [name for name in description["give_on_load"] if name not in given]:
        again = ", ".join(f"{name}=..." for name in missing)
        raise NotGivenError(f"could not hold all that the model was made with: load(path, net, {again})")
    stored = {name: decode(code) for name, code in description["hyperparameters"].items() if name not in given}
    return stored | given


def _set_counters(model: AdaptiveModel, counters: dict[str, Any]) -> None:
    for name, value in counters.items():
        if name not in model.counters or type(value) is not int:
            raise ValueError(f"it counts {name!r} as {value!r}, which the model does not")
        setattr(model, name, value)
