"""Options that are written once: a dataclass, from which keywords, command-line options and keys of files are made.

A subject declares its options as a frozen dataclass with keyword-only fields. ``Annotated[type, Option(...)]`` makes a
field an option of the command as well; ``Annotated[type, Doc("...")]`` is for callers in Python only, such as a
callback. With both, ``Doc`` describes the keyword, where its value is not what one types. :func:`takes_options` gives a
function the fields as keywords, and ``ctta.cli.options.command`` a command its options.
"""

import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from typing_extensions import Doc

from ctta.errors import ConfigError, DataError

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
R = TypeVar("R")
OptionsT = TypeVar("OptionsT")
OptionsT_co = TypeVar("OptionsT_co", covariant=True)


@dataclass(frozen=True)
class Option:
    """How the command line and a configuration file name a field of a dataclass of options.

    Attributes:
        documentation: What the option does, in the imperative; ``Default: ...`` at its end says what None means.
        metavar: Stands for the value in help texts, such as ``"N"``; by default the choices of a ``Literal``.
        name: How the option is typed, such as ``"--set"``; by default ``--`` and the name of the field.
        min: Smallest number.
        max: Largest number.
        panel: Section of the help text.
        parse: Turns the typed text, or the list of them if ``repeatable``, into the value; by default the type does.
        repeatable: Whether the option can be given several times.
        key: Where a configuration file has the value, such as ``"network.model"``.
    """

    documentation: str
    metavar: str | None = None
    name: str | None = None
    min: float | None = None
    max: float | None = None
    panel: str | None = None
    parse: Callable[[Any], Any] | None = None
    repeatable: bool = False
    key: str | None = None

    def with_default(self, text: str) -> "Option":
        """Return the option with a sentence at its end on what holds where it is not given."""
        return replace(self, documentation=f"{self.documentation} Default: {text}.")


def find_options(options: type) -> dict[str, tuple[Any, Option]]:
    """Return the type and the option of each field that has one, by the name of the field."""
    found = {name: (kind, _find(Option, metadata)) for name, kind, *metadata in _list_fields(options)}
    return {name: (kind, option) for name, (kind, option) in found.items() if option is not None}


def refuse_options(options: Any, names: Sequence[str], command: str, hint: str) -> None:
    """Raise a ConfigError for the first option that a command does not take and that is set.

    Args:
        options: The dataclass.
        names: The fields that the command does not take.
        command: What the user has typed.
        hint: What to do instead.
    """
    known = find_options(type(options))
    for field in fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            name = (known[field.name][1].name if field.name in known else None) or field.name
            option = name if name.startswith("--") else f"--{name.replace('_', '-')}"
            raise ConfigError(f"'{command}' does not take {option}: {hint}")


def describe_fields(options: type) -> dict[str, str]:
    """Return what each field means to callers in Python, by its name: the text of ``Doc``, else of ``Option``."""
    found = {name: _find(Doc, metadata) or _find(Option, metadata) for name, _, *metadata in _list_fields(options)}
    return {name: text.documentation for name, text in found.items() if text is not None}


def _list_fields(options: type) -> list[list[Any]]:
    """Return the name, the type and the metadata of each field."""
    hints = get_type_hints(options, include_extras=True)
    found = [(each.name, hints[each.name]) for each in fields(options)]
    return [[name, *(get_args(hint) if get_origin(hint) is Annotated else [hint])] for name, hint in found]


def _find(kind: type[R], metadata: list[Any]) -> R | None:
    return next((each for each in metadata if isinstance(each, kind)), None)


class _Decorator(Protocol[P, OptionsT_co]):
    """Turns a function whose last argument is a dataclass into one with its fields as keywords."""

    @overload
    def __call__(self, function: Callable[[OptionsT_co], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[[A, OptionsT_co], R], /) -> Callable[Concatenate[A, P], R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, OptionsT_co], R], /) -> Callable[Concatenate[A, B, P], R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, C, OptionsT_co], R], /) -> Callable[Concatenate[A, B, C, P], R]: ...


def takes_options(options: Callable[P, OptionsT]) -> _Decorator[P, OptionsT]:
    """Replace the last argument of a function, a dataclass of options, by a keyword for each of its fields.

    In the docstring, the line of that argument is replaced by the descriptions of the fields.

    Args:
        options: The dataclass; its fields are keyword-only.

    Returns:
        A decorator for functions of up to three other arguments.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Choice:
    ...     batch_size: Annotated[int, Option("Adapt to N images at a time.", "N", min=1)] = 32
    >>> @takes_options(Choice)
    ... def count_batches(num_images: int, options: Choice) -> int:
    ...     return -(-num_images // options.batch_size)
    >>> count_batches(64), count_batches(64, batch_size=16), inspect.signature(count_batches)
    (2, 4, <Signature (num_images: int, *, batch_size: int = 32) -> int>)
    """
    build: Any = options

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True)
        *others, last = own.parameters.values()
        hints = get_type_hints(build)
        keywords = [each.replace(annotation=hints[name]) for name, each in inspect.signature(build).parameters.items()]
        signature = own.replace(parameters=[*others, *keywords])

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            try:
                arguments = signature.bind(*args, **given).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            own_arguments = {each.name: arguments.pop(each.name) for each in others if each.name in arguments}
            return function(**own_arguments, **{last.name: build(**arguments)})

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _describe_keywords(inspect.getdoc(function) or "", last.name, describe_fields(build))
        return call

    return decorate


def _describe_keywords(docstring: str, name: str, texts: dict[str, str]) -> str:
    """Return a docstring in which the line of one argument is replaced by the descriptions of others."""
    lines = [textwrap.fill(f"{each}: {text}", 110, subsequent_indent="    ") for each, text in texts.items()]
    before, line, after = docstring.partition(f"\n    {name}: ")
    _, newline, rest = after.partition("\n")
    return f"{before}\n{textwrap.indent(chr(10).join(lines), '    ')}{newline}{rest}" if line else docstring


def parse_names(text: str) -> list[str]:
    """Parse a comma-separated list.

    >>> parse_names("tent, cotta")
    ['tent', 'cotta']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_channels(text: str) -> tuple[float, ...]:
    """Parse one number per channel, or one for all of them.

    >>> parse_channels("0.5, 0.4, 0.3")
    (0.5, 0.4, 0.3)
    """
    try:
        values = tuple(float(part) for part in parse_names(text))
    except ValueError:
        values = ()
    if len(values) not in (1, 3):
        raise ConfigError(f"expected three numbers such as 0.5,0.5,0.5, or one for all channels; got {text!r}")
    return values


def resolve_device(name: str) -> str:
    """Return the name of a device; for ``"auto"`` that of the accelerator of this machine, or ``"cpu"``."""
    if name != "auto":
        return name
    import torch  # here, since the command answers --help without it

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def read_class_names(path: str | os.PathLike[str]) -> list[str]:
    """Read one class name per line."""
    try:
        names = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: expected a file with one class name per line") from error
    if not names:
        raise DataError(f"{path} is empty: expected a file with one class name per line")
    return names


# Options that several subjects have; where None means something else to each, it says so by ``with_default``.
MODEL = Option(
    "Load this network: embedded, timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function.",
    "SPEC",
    key="network.model",
)
METHOD = Option(
    "Use this method or preset, such as tent or cotta_fast (see: ctta methods), or a class of your own: "
    "file:PATH.py:Class.",
    "NAME",
    key="method.name",
)
SETTINGS = Option(
    "Set a hyperparameter of the method, such as restore=0.005, lr=1e-4 or views=8; repeatable.",
    "NAME=VALUE",
    "--set",
    repeatable=True,
    key="method.settings",
)
POLICIES = Option(
    "Apply this policy around the updates of the method, such as reset_every=1000, restore=0.01 or "
    "reset_every=64000,unit=images (see: ctta methods); repeatable. Default: none.",
    "NAME[=VALUE]",
    "--policy",
    repeatable=True,
    key="method.policies",
)
BATCH_SIZE = Option("Adapt to N images at a time.", "N", min=1, key="stream.batch_size")
CLASSES = Option(
    "Read the class names from this text file, one per line, in the order of the network's outputs.",
    "FILE",
    parse=read_class_names,
)

DEVICE = Option(
    "Run the network on this torch device, such as cuda:0; auto for an accelerator if there is one.",
    "DEVICE",
    parse=resolve_device,
)
Device = Annotated[str, DEVICE]
#: Names of the 16-bit types that networks can compute in.
Precision = Literal["bf16", "fp16"]
AMP = Option(
    "Run the networks under torch.autocast in bfloat16 or float16; what learns stays in float32. Default: float32."
)
Amp = Annotated[Precision | None, AMP]
Size = Annotated[
    tuple[int, int] | None,
    Option("Resize the images. Default: keep their size.", "HEIGHT WIDTH", key="network.size"),
]
Mean = Annotated[
    Sequence[float] | None,
    Option(
        "Normalize images by this mean per channel, such as 0.485,0.456,0.406, for a network that expects it. "
        "Default: the network gets images in [0, 1].",
        "R,G,B",
        parse=parse_channels,
        key="network.mean",
    ),
]
Std = Annotated[
    Sequence[float] | None,
    Option(
        "Divide by this standard deviation per channel; give it with --mean.",
        "R,G,B",
        parse=parse_channels,
        key="network.std",
    ),
]
Classes = Annotated[Sequence[str] | None, CLASSES, Doc("Class names, in the order of the network's outputs.")]
Insecure = Annotated[
    bool, Option("Accept a file of which no SHA-256 is known, so that it cannot be verified completely.")
]
