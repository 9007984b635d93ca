"""Reading hyperparameters back from a model, and showing them."""

import inspect
from functools import partial
from typing import Any


def read_hyperparameters(model: object) -> dict[str, Any]:
    """The constructor's arguments after the first, from the attributes of the same name."""
    _net, *names = inspect.signature(type(model)).parameters
    # ``optimizer`` is the built one, so its hyperparameter is the factory.
    attributes = {name: "optimizer_factory" if name == "optimizer" else name for name in names}
    for name, attribute in attributes.items():
        if not hasattr(model, attribute):
            raise TypeError(f"{type(model).__name__} must store its argument {name!r} as self.{name}")
    return {name: getattr(model, attribute) for name, attribute in attributes.items()}


def show_hyperparameters(values: dict[str, Any]) -> str:
    """As one would type them; an optimiser factory as ``Adam(lr=0.001)``.

    >>> show_hyperparameters({"optimizer": partial(dict, lr=0.1), "decay": 0.999})
    'optimizer=dict(lr=0.1), decay=0.999'
    """
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """One value as one would type it."""
    factory = partial(value) if isinstance(value, type) else value
    if not isinstance(factory, partial):
        return repr(value)
    return f"{factory.func.__name__}({show_hyperparameters(factory.keywords)})"
