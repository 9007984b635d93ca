"""Hyperparameters of a method: read back from a model, formatted as text, and parsed from text.

The names are those of the constructor's keyword arguments; there is no other configuration format.
"""

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack, get_origin, get_type_hints

import torch

from ctta.core.options import Precision
from ctta.core.updates import Policy
from ctta.errors import CheckpointError, ConfigError, did_you_mean
from ctta.nn import BatchStats
from ctta.nn.surgery import Output
from ctta.optim import OptimizerFactory
from ctta.source_stats import SourceStats
from ctta.views import AugMixViews, GeometricViews, ImageViews, image_views

#: Arguments that methods have in common. A docstring describes the method's own, and these where it has more to say.
COMMON_ARGUMENTS = {
    "optimizer": "A factory of the optimizer.",
    "lr": "The learning rate, if it should differ from that of ``optimizer``.",
    "policies": "What happens around the updates, see :mod:`ctta.policies`.",
    "batch_stats": "The fraction of the batch in BatchNorm's statistics; by default only the batch, from 16 images on.",
    "seed": "The seed of all random draws, which depend on nothing else but the number of steps.",
    "output": "Where the logits are in the network's output; by default the usual places.",
    "amp": '``"bf16"`` or ``"fp16"`` to run the networks under ``torch.autocast``.',
}


class PassArguments(TypedDict, total=False):
    """The :class:`CommonArguments` of a method that does not learn."""

    output: Output
    amp: Precision | None


class _TrainingArguments(PassArguments, total=False):
    lr: float | None
    policies: Sequence[Policy]


class CommonWithoutSeed(_TrainingArguments, total=False):
    """The :class:`CommonArguments` of a method that draws nothing at random."""

    batch_stats: BatchStats


class CommonWithoutBatchStats(_TrainingArguments, total=False):
    """The :class:`CommonArguments` of a method that has statistics of its own."""

    seed: int


class CommonArguments(CommonWithoutSeed, CommonWithoutBatchStats, total=False):
    """The keyword arguments that methods which learn have in common, beside ``optimizer`` with its own default.

    A method takes them as ``**common: Unpack[CommonArguments]`` and passes them on to the constructor of the base,
    which has their defaults.
    """


def expand_signature(cls: type, base: type) -> inspect.Signature:
    """Return the signature of a method's constructor with the arguments written out that ``**common`` stands for.

    These are the keys of the :class:`CommonArguments`, or part of them, that it is annotated with; without an
    annotation all keywords of the class that it extends.

    Args:
        cls: The method.
        base: The base class of methods.

    >>> from ctta import AdaptiveModel
    >>> class Mine(AdaptiveModel):
    ...     def __init__(self, net, *, rate=0.1, **common: Unpack[CommonWithoutSeed]): ...
    >>> list(inspect.signature(Mine).parameters)
    ['net', 'rate', 'lr', 'policies', 'batch_stats', 'output', 'amp']
    """
    signature = inspect.signature(vars(cls)["__init__"])
    *own, last = signature.parameters.values()
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return signature
    parent = next(each for each in cls.__mro__[1:] if issubclass(each, base))
    _net, *inherited = inspect.signature(parent).parameters.values()
    annotation = last.annotation
    if isinstance(annotation, str):  # of a module that postpones the evaluation of its annotations
        annotation = get_type_hints(vars(cls)["__init__"])[last.name]
    is_typed = get_origin(annotation) is Unpack
    taken = annotation.__args__[0].__annotations__ if is_typed else {each.name for each in inherited}
    common = [each for each in inherited if each.name in taken and each.name not in signature.parameters]
    # The learning rate follows the optimizer that it is part of.
    after_optimizer = next((number for number, each in enumerate(own, 1) if each.name == "optimizer"), len(own))
    rate = [each for each in common if each.name == "lr"]
    others = [each for each in common if each.name != "lr"]
    return signature.replace(parameters=[*own[:after_optimizer], *rate, *own[after_optimizer:], *others])


def document_common_arguments(cls: type) -> None:
    """Add the common arguments that the constructor of a method takes to its docstring.

    Args:
        cls: The class; its docstring has a section ``Args:`` in which the common arguments that it does not list are
            written last.

    >>> class Mine:
    ...     '''Adapt.
    ...
    ...     Args:
    ...         net: The network.
    ...     '''
    ...     def __init__(self, net, *, lr=None): ...
    >>> document_common_arguments(Mine)
    >>> "lr: The learning rate" in Mine.__doc__
    True
    """
    section = re.search(r"^( *)Args:\n(?:\1 +\S.*(?:\n|$))+", cls.__doc__ or "", re.MULTILINE)
    if section is None or cls.__doc__ is None:
        return
    missing = [
        f"{section[1]}    {name}: {COMMON_ARGUMENTS[name]}\n"
        for name in inspect.signature(cls).parameters
        if name in COMMON_ARGUMENTS and not re.search(rf"^ *{name}:", section[0], re.MULTILINE)
    ]
    end = section.end()
    cls.__doc__ = cls.__doc__[:end] + "".join(missing) + cls.__doc__[end:]


def read_hyperparameters(model: object) -> dict[str, Any]:
    """Return the constructor's arguments after the first, from the attributes of the same name.

    An optional ``lr`` beside ``optimizer`` is part of the optimizer's factory and not listed again.
    """
    _net, *parameters = inspect.signature(type(model)).parameters.values()
    has_optimizer = any(parameter.name == "optimizer" for parameter in parameters)
    names = [parameter.name for parameter in parameters if not (has_optimizer and _is_lr(parameter))]
    # ``optimizer`` is the built optimizer, so the hyperparameter is its factory.
    attributes = {name: "optimizer_factory" if name == "optimizer" else name for name in names}
    for name, attribute in attributes.items():
        if not hasattr(model, attribute):
            raise TypeError(f"{type(model).__name__} must store its argument {name!r} as self.{name}")
    values = {name: getattr(model, attribute) for name, attribute in attributes.items()}
    # Not part of files and results in float32, so that those of earlier versions resume.
    return {name: value for name, value in values.items() if name != "amp" or value is not None}


def _is_lr(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is the optional learning rate that :meth:`AdaptiveModel.optimize` takes."""
    return parameter.name == "lr" and parameter.default is None


def format_hyperparameters(values: Mapping[str, Any]) -> str:
    """Return hyperparameters as one would type them.

    >>> format_hyperparameters({"optimizer": partial(dict, lr=0.1), "decay": 0.999})
    'optimizer=dict(lr=0.1), decay=0.999'
    """
    return ", ".join(f"{name}={format_value(value)}" for name, value in values.items())


def format_value(value: Any) -> str:
    """Return one value as one would type it, the same in every process; a factory as ``Adam(lr=0.001)``."""
    factory = partial(value) if isinstance(value, type) else value
    if isinstance(value, tuple | list):
        return f"({', '.join(format_value(item) for item in value)})"
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(factory, partial):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address differs between processes
    return f"{factory.func.__name__}({format_hyperparameters(factory.keywords)})"


def parse_hyperparameters(
    method: Callable[..., Any],
    texts: Iterable[str],
    given: Mapping[str, Any] | None = None,
    *,
    owner: str | None = None,
) -> dict[str, Any]:
    """Return keyword arguments of a method from texts such as ``restore=0.005``.

    Beside the names of the method, ``lr=1e-4`` and ``optimizer.momentum=0.9`` set arguments of the optimizer,
    ``optimizer=SGD`` chooses one of ``torch.optim``, ``views=8`` sets the number of random views, and
    ``source_stats=FILE`` reads what ``ctta source-stats`` wrote.

    Args:
        method: The class, or the function, that the arguments are for.
        texts: Each ``NAME=VALUE``, with a Python literal or a plain word as the value.
        given: Arguments that replace the method's defaults; ``lr`` then changes the given optimizer.
        owner: What errors call the class; by default its name.

    Returns:
        The arguments named in the texts.

    Raises:
        ConfigError: A text cannot be parsed, or the method or optimizer has no such argument.

    >>> from ctta.methods import CoTTA
    >>> parse_hyperparameters(CoTTA, ["restore=0.005", "gate=element", "lr=1e-4"])["optimizer"].keywords
    {'lr': 0.0001}
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    } | dict(given or {})
    arguments: dict[str, Any] = {}
    optimizer_arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value_text = (part.strip() for part in text.partition("="))
        if not (name and equals and value_text):
            raise ConfigError(f"expected a setting NAME=VALUE, such as restore=0.005, got {text!r}")
        value = _parse_literal(value_text)
        if "optimizer" in defaults and (name.startswith("optimizer.") or (name == "lr" and not defaults.get("lr"))):
            optimizer_arguments[name.removeprefix("optimizer.")] = value
        elif name not in defaults:
            known = list(dict.fromkeys([*defaults, *(["lr"] if "optimizer" in defaults else [])]))
            raise ConfigError(
                f"{owner or method.__name__} has no setting {name!r}{did_you_mean(name, known)}; "
                f"it has {', '.join(known) or 'none'}"
            )
        else:
            arguments[name] = _convert(name, value, defaults[name])
    if optimizer_arguments:
        factory = arguments.get("optimizer", defaults["optimizer"])
        arguments["optimizer"] = _bind_arguments(factory, optimizer_arguments)
    return arguments


def _parse_literal(text: str) -> Any:
    """Return the value of a Python literal, or the text itself if it is a plain word, as in gate=element."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the compiler, for words such as 8x: here they are text
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two for deep nesting
        return text


def _convert(name: str, value: Any, default: Any) -> Any:
    """Return a parsed value as the constructor takes it; a number, or an integer, where the default is one."""
    if name == "optimizer":
        optimizer = getattr(torch.optim, str(value), None)
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise ConfigError(f"optimizer must name a class of torch.optim, such as SGD, got {value!r}")
        return partial(optimizer)
    if name == "views":
        return _convert_views(value, default)
    if name == "views_at_once" and value == "auto":
        return value
    if name in ("source_stats", "posterior"):
        return load_stats_setting(name, str(value))
    if name == "replay":
        raise ConfigError("source images to replay are given in Python: replay=ctta.SourceReplay(images, labels)")
    if name == "policies":
        raise ConfigError("policies are parsed by ctta.core.registry.parse_settings")
    if isinstance(default, bool):
        named = {"true": True, "false": False}
        if (chosen := named.get(str(value).lower())) is None:
            raise ConfigError(f"{name} must be True or False, got {value!r}")
        return chosen
    if isinstance(default, int | float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name} must be a number such as {default}, got {value!r}")
    if isinstance(default, int) and not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer such as {default}, got {value!r}")
    return value


def load_stats_setting(name: str, path: str) -> SourceStats:
    """Return the statistics in a file that a user has named.

    Args:
        name: The setting: ``"source_stats"`` or ``"posterior"``.
        path: The file.

    Returns:
        The statistics.

    Raises:
        ConfigError: The file cannot be read.
    """
    origin = "'ctta source-stats'" if name == "source_stats" else "ctta.weight_posterior(...).save"
    try:
        return SourceStats.load(path)
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"{name} must name a file of {origin}: {error}") from error


def _convert_views(value: Any, default: Any) -> Any:
    """Return as many random views as ``value`` says, of the default's kind."""
    if type(value) is not int or value < 0:
        raise ConfigError(f"views must be a number of random views, 0 for none, got {value!r}")
    if not value:
        return ()
    if isinstance(default, tuple) and default:  # random views rotate images, which fixed views for segmentation avoid
        raise ConfigError(f"views are {len(default)} fixed ones here: leave the setting out, or give 0 for none")
    known = ImageViews | AugMixViews | GeometricViews
    return replace(default, num_views=value) if isinstance(default, known) else image_views(value)


def _bind_arguments(factory: OptimizerFactory, arguments: dict[str, Any]) -> OptimizerFactory:
    """Return the factory with these arguments, after trying it on a single weight."""
    lr = arguments.get("lr", 0.0)
    if isinstance(lr, bool) or not isinstance(lr, int | float):  # the optimizer would complain about a comparison
        raise ConfigError(f"lr must be a number such as 0.001, got {lr!r}")
    bound = partial(factory, **arguments)
    try:
        bound([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:  # an unknown argument, or a value that it does not allow
        raise ConfigError(f"the optimizer does not take {format_hyperparameters(arguments)}: {error}") from error
    return bound
