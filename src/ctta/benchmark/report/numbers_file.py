"""``numbers.json``: the content of a report as JSON, from which its page and pictures can be drawn again."""

import json
import re
from dataclasses import fields, is_dataclass
from math import isnan, nan
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ctta.benchmark.report.tables import NUM_DIGITS
from ctta.errors import DataError

T = TypeVar("T")

FORMAT = 1


def format_numbers(content: object) -> str:
    """Return the content of a report, or another dataclass, as JSON: six decimals, lists of numbers on one line."""
    text = json.dumps({"format": FORMAT} | _encode(content), indent=1, ensure_ascii=False, allow_nan=False)
    # A line break is never inside a string, so these are lists without lists or objects in them.
    return re.sub(r"\[\n[^\[\]{}]*\n *\]", _join_lines, text) + "\n"


def parse_numbers(text: str, kind: type[T]) -> T:
    """Return the content that :func:`format_numbers` has written.

    Args:
        text: The JSON.
        kind: The class of the content.

    Returns:
        The content, with numbers rounded as in the file.

    Raises:
        ValueError: The text is not such a file; TypeError and LookupError are possible as well.
    """
    values = json.loads(text)
    if values.pop("format") != FORMAT:
        raise ValueError("it was written by another version of ctta")
    return _decode(kind, values)


def read_numbers(path: Path, kind: type[T]) -> T:
    """Read ``numbers.json`` of a report, or of something else that is written with its numbers.

    Args:
        path: The file.
        kind: The class of the content, such as :class:`ReportContent`.

    Returns:
        The content.

    Raises:
        DataError: The file is not one of a report, or is damaged.
    """
    try:
        return parse_numbers(path.read_text(encoding="utf-8"), kind)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {error}): expected numbers.json of a report"
        ) from error


def _join_lines(match: re.Match[str]) -> str:
    return "[" + " ".join(line.strip() for line in match[0][1:-1].split("\n") if line.strip()) + "]"


def _encode(value: Any) -> Any:
    """Return a value as JSON has it: nan is null, and fields that have their default are left out."""
    if is_dataclass(value):
        present = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return {name: _encode(each) for name, (each, default) in present.items() if each != default}
    if isinstance(value, tuple | list):
        return [_encode(each) for each in value]
    if isinstance(value, dict):
        return {name: _encode(each) for name, each in value.items()}
    if isinstance(value, float):
        rounded = round(value, NUM_DIGITS)
        return None if isnan(value) else int(rounded) if rounded.is_integer() else rounded
    return value


def _decode(kind: type[T], value: Any) -> T:
    """Return a value of a type from what :func:`_encode` made of it.

    Raises:
        TypeError: The value is not of the type.
    """
    return _decode_any(kind, value)  # type: ignore[no-any-return]


def _decode_any(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is float and (value is None or isinstance(value, int | float)):
        return nan if value is None else float(value)
    if origin in (UnionType, Union):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _decode_any(inner, value)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_decode_any(*pair) for pair in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {name: _decode_any(arguments[1], each) for name, each in value.items()}
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints: dict[str, Any] = get_type_hints(kind)
        return kind(**{name: _decode_any(hints[name], each) for name, each in value.items()})
    if origin is None and isinstance(kind, type) and type(value) is kind:
        return value
    raise TypeError(f"expected {kind}, got {value!r}"[:200])
